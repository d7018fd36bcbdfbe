"""A document that is long is a chunk of its own, written piece by piece: the same files, in little memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from megatron_llama.data import documents, readers
from megatron_llama.data.preprocess import preprocess
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.data.readers import LONG_BYTES
from megatron_llama.data.tokenizer import words
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.errors import DataError
from pyarrow import parquet

from tests.data.tokenizer.layouts import TIKTOKEN

LONG = 2000


@pytest.fixture
def records(texts: list[str]) -> list[dict[str, Any]]:
    """Short and long ones, first and last too, with every kind of escape and width of characters."""
    odd = [
        '\U0001f600 我们 é\f\x01\x7f\\u00e9\\\\u4e2d " \t\r\n' * 90,
        "x" * LONG,
        "",
        " " * (LONG + 1),
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16") * LONG,
    ]
    found = [text for pair in zip(texts, [*odd, *texts[40:55]], strict=False) for text in pair]
    return [{"text": text, "tïtle": f"é {number}" if number % 3 else text} for number, text in enumerate(found)]


def as_lines(records: list[dict[str, Any]], path: Path, ascii: bool) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=ascii) + "\n" for record in records), encoding="utf-8")
    return path


def write(records: list[dict[str, Any]], folder: Path) -> dict[str, Path]:
    files = {"escaped": as_lines(records, folder / "a.jsonl", True), "plain": as_lines(records, folder / "b.jsonl", False)}
    files["mark"] = folder / "m.jsonl"
    files["mark"].write_bytes(b"\xef\xbb\xbf" + files["plain"].read_bytes())
    files["gz"] = folder / "c.jsonl.gz"
    files["gz"].write_bytes(gzip.compress(files["plain"].read_bytes()))
    files["parquet"] = folder / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), files["parquet"])
    return files


def run(source: Path, out: Path, tokenizer: SentencePieceTokenizer, **options: Any) -> Any:
    given = {"json_keys": ("text", "tïtle"), "append_eod": True, **options}
    return preprocess(PreprocessConfig(input=(str(source),), output_prefix=str(out), tokenizer_model=str(tokenizer.path), **given))


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, documents):
        monkeypatch.setattr(module, "LONG_BYTES", LONG)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 3 * LONG)
    monkeypatch.setattr(words, "PIECE", 100)


def contents(out: Path) -> list[bytes]:
    return [Path(f"{out}_{key}_document{suffix}").read_bytes() for key in ("text", "tïtle") for suffix in (".bin", ".idx")]


@pytest.mark.long
@pytest.mark.parametrize(("workers", "formats"), [(1, ("escaped", "plain", "mark", "gz", "parquet")), (2, ("plain", "parquet"))], ids=str)
def test_the_same_files(
    workers: int,
    formats: tuple[str, ...],
    records: list[dict[str, Any]],
    tokenizer: SentencePieceTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = write(records, tmp_path)
    usual = run(files["escaped"], tmp_path / "usual", tokenizer)
    shorten(monkeypatch)
    monkeypatch.setattr("megatron_llama.data.preprocess.CHUNK_BYTES", 3 * LONG)  # or there is one process
    for name in formats:
        file = files[name]
        report = run(file, tmp_path / name, tokenizer, workers=workers)
        assert contents(tmp_path / name) == contents(tmp_path / "usual"), name
        assert (report.documents, report.tokens, report.skipped) == (usual.documents, usual.tokens, usual.skipped)
        assert report.bytes == file.stat().st_size
        run(file, tmp_path / f"one {name}", tokenizer, workers=workers, json_keys=("text",))
        for suffix, content in zip((".bin", ".idx"), contents(tmp_path / "usual"), strict=False):
            assert Path(f"{tmp_path}/one {name}{suffix}").read_bytes() == content, name


def test_a_text_file(texts: list[str], tokenizer: SentencePieceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("".join(texts[:9]))
    run(tmp_path / "a.txt", tmp_path / "usual", tokenizer, json_keys=("text",))
    shorten(monkeypatch)
    monkeypatch.setattr(readers, "LARGEST_RECORD", LONG)  # corpora of one file have more than the bound of what is unpacked
    run(tmp_path / "a.txt", tmp_path / "long", tokenizer, json_keys=("text",))
    assert (tmp_path / "long.bin").read_bytes() == (tmp_path / "usual.bin").read_bytes()


BAD: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda line: line[:-2],
    "no UTF-8": lambda line: line.replace(b"xxx", b"\xed\xa0\x80", 1),
    "half a surrogate pair": lambda line: line.replace(b"xxx", b"\\ud83d", 1),
    "no such field": lambda line: line.replace(b'"text"', b'"test"'),
    "a number": lambda line: line.replace(b'"short"', b"1"),
    "an array": lambda line: b"[" + line + b"]",
    "two values": lambda line: line + b"{}",
    "a control character": lambda line: line.replace(b"xxx", b"\x01", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_long_line_is_what_is_wrong_with_any(
    name: str, tokenizer: SentencePieceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"text": "x" * (2 * LONG), "tïtle": "short"}, ensure_ascii=False).encode()
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a", "t\xc3\xaftle": "b"}\n' + BAD[name](line) + b"\n")
    with pytest.raises(DataError) as usual:
        run(source, tmp_path / "out", tokenizer)
    shorten(monkeypatch)
    with pytest.raises(DataError) as long:
        run(source, tmp_path / "out", tokenizer)
    assert str(long.value) == str(usual.value) and f"{source}:2" in str(long.value)


MEASURE = (
    "import resource, subprocess, sys; subprocess.run([sys.executable, '-m', 'megatron_llama', *sys.argv[1:]], check=True);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("mistral", "llama3", "qwen", TIKTOKEN))])
def test_memory_of_forty_megabytes_on_one_line(name: str, layouts: Path, texts: list[str], tmp_path: Path) -> None:
    """One emoji, for which Python takes four bytes for each character of the text; and a special token that is spelt."""
    text = "".join(texts)
    many = text * (40_000_000 // len(text) + 1) + " </s> <|eot_id|> \U0001f600 " + text
    source = as_lines([{"text": "first"}, {"text": many}, {"text": "last"}], tmp_path / "a.jsonl", False)
    size = source.stat().st_size
    command = ["preprocess", "--input", source, "--output-prefix", tmp_path / "out", "--tokenizer-model", layouts / name, "--workers", 1]
    ended = subprocess.run([sys.executable, "-c", MEASURE, *map(str, command)], capture_output=True, text=True, check=True)
    said, peak = ended.stdout.strip().rsplit("\n", 1)
    assert "3 documents" in said and size > LONG_BYTES
    assert int(peak) < 10 * size, f"{int(peak):,} bytes for {size:,}"
