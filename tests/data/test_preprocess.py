"""Text to indexed datasets: what is written, that workers do not matter, and what is refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import sentencepiece
import zstandard
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.meta import read_meta
from megatron_llama.data.preprocess import PreprocessReport, preprocess
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.data.readers import CHUNK_BYTES
from megatron_llama.data.sums import DatasetSums
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.errors import ConfigError, DataError
from pyarrow import parquet

from tests.refused import all_refused


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(inputs: list[Path], out: Path, tokenizer: SentencePieceTokenizer, **options: Any) -> PreprocessReport:
    given = {"tokenizer_model": str(tokenizer.path), **options}
    return preprocess(PreprocessConfig(input=tuple(map(str, inputs)), output_prefix=str(out), **given))


def read(prefix: Path) -> list[list[int]]:
    """Through Megatron's reader."""
    from megatron.core.datasets import indexed_dataset as megatron

    dataset = megatron.IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_jsonl(texts: list[str], tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text, "id": i} for i, text in enumerate(texts)])
    report = run([source], tmp_path / "out" / "corpus", tokenizer)
    expected = [tokenizer.encode(text) for text in texts]
    assert read(tmp_path / "out" / "corpus") == expected
    assert IndexedDataset(tmp_path / "out" / "corpus").dtype == np.uint16
    assert (report.documents, report.tokens, report.skipped) == (len(texts), sum(map(len, expected)), 0)
    assert report.bytes == source.stat().st_size
    assert report.outputs == (str(tmp_path / "out" / "corpus"),)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["corpus-tokenizer", "corpus.bin", "corpus.idx", "corpus.meta.json"]
    assert f"{len(texts)} documents, {report.tokens:,} tokens" in str(report)


def test_append_eod_and_empty_documents(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in ("one", "", "two", "", " ")])
    report = run([source], tmp_path / "c", tokenizer, append_eod=True)
    assert read(tmp_path / "c") == [[*tokenizer.encode(text), 2] for text in ("one", "two", " ")]
    assert (report.documents, report.skipped) == (3, 2)


def test_text_files_and_folders(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("hidden")
    (folder / "b" / "2.md").write_bytes("\ufeffsecond\r\n\n  file é\n".encode())
    (folder / "a.txt").write_text("first")
    (folder / "empty.txt").write_text("")
    write_jsonl(folder / "c.json", [{"text": "third"}, {"text": "fourth"}])
    with (folder / "c.json").open("a") as stream:
        stream.write("\n  \n")
    last = tmp_path / "last.rst"
    last.write_text("fifth")
    report = run([folder, last], tmp_path / "c", tokenizer)
    documents = [tokenizer.decode(ids) for ids in read(tmp_path / "c")]
    assert documents == ["first", "second\r\n\n  file é\n", "third", "fourth", "fifth"]
    assert report.skipped == 1


def test_several_keys(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b", "title": "A"}, {"text": "c", "title": ""}])
    report = run([source], tmp_path / "c", tokenizer, json_keys=("text", "title"))
    assert report.outputs == (str(tmp_path / "c_text_document"), str(tmp_path / "c_title_document"))
    assert read(tmp_path / "c_text_document") == [tokenizer.encode("a b"), tokenizer.encode("c")]
    assert read(tmp_path / "c_title_document") == [tokenizer.encode("A")]
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(DataError, match=r"plain\.txt: got a plain text file, expected only \.jsonl and \.parquet files"):
        run([tmp_path / "plain.txt"], tmp_path / "d", tokenizer, json_keys=("text", "title"))


def test_megatron_names(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    run([source], tmp_path / "c", tokenizer, megatron_names=True)
    names = ["c-tokenizer", "c_text_document.bin", "c_text_document.idx", "c_text_document.meta.json", "in.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_any_number_of_workers_gives_the_same_files(texts: list[str], tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    records = [{"text": text and f"{i} {text}"} for i in range(9) for text in [*texts, ""]]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    assert source.stat().st_size > 3 * CHUNK_BYTES
    (tmp_path / "files").mkdir()  # a chunk each: many more than may wait for the writer at a time
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i:03}.txt").write_text(text)
    inputs = [source, tmp_path / "files"]
    reports = [run(inputs, tmp_path / f"w{n}", tokenizer, workers=n, append_eod=True) for n in (1, 2, 3)]
    for suffix in (".bin", ".idx"):
        contents = {(tmp_path / f"w{n}{suffix}").read_bytes() for n in (1, 2, 3)}
        assert len(contents) == 1
    metas = [read_meta(tmp_path / f"w{n}") or {} for n in (1, 2, 3)]
    assert all({**meta, "tokenizer": None} == {**metas[0], "tokenizer": None} for meta in metas)
    read_bytes = sum(path.stat().st_size for path in [source, *(tmp_path / "files").iterdir()])
    assert {(r.documents, r.tokens, r.skipped, r.bytes) for r in reports} == {
        (10 * len(texts), IndexedDataset(tmp_path / "w1").num_tokens, 9, read_bytes)
    }


def test_meta(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    report = run([source], tmp_path / "c", tokenizer)
    copy = tmp_path / "c-tokenizer" / "tokenizer.model"
    fingerprint = Fingerprint.of(tokenizer, 2000).entry()
    meta = {"tokenizer": str(copy), "fingerprint": fingerprint, "vocab_size": 2000, "eod": 2, "documents": 1, "tokens": report.tokens}
    found = read_meta(tmp_path / "c")
    assert found is not None
    assert isinstance(found.pop("sums"), DatasetSums)
    assert found == meta and report.tokenizer == str(copy)
    assert json.loads((tmp_path / "c.meta.json").read_text())["tokenizer"] == "c-tokenizer/tokenizer.model"
    assert copy.read_bytes() == tokenizer.path.read_bytes()
    assert read_meta(tmp_path / "other") is None
    (tmp_path / "c.meta.json").write_text("{")
    with pytest.raises(DataError, match=r"c\.meta\.json:1: got .* expected valid JSON"):
        read_meta(tmp_path / "c")


def test_training_a_tokenizer(texts: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    options = PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "out" / "c"), train_tokenizer=True, vocab_size=900)
    report = preprocess(options)
    folder = tmp_path / "out" / "c-tokenizer"
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["c-tokenizer", "c.bin", "c.idx", "c.meta.json"]
    meta = read_meta(tmp_path / "out" / "c")
    assert meta is not None
    assert meta["tokenizer"] == report.tokenizer == str(folder / "tokenizer.model")
    assert json.loads((tmp_path / "out" / "c.meta.json").read_text())["tokenizer"] == "c-tokenizer/tokenizer.model"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == meta["vocab_size"] == 900
    assert [tokenizer.decode(ids) for ids in read(tmp_path / "out" / "c")] == texts


def test_every_problem_of_the_input_is_told(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    lines = [
        b'{"text": "fine"}', b'{"text": "cut', b'{"title": "x", "body": "y"}', b'{"text": 7}', b'{"text": null}', b'["text"]',
        b'{"text": "\xff"}', b'{"text": "\\ud83d"}', b'[{"text": "one"},',
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        run([source], tmp_path / "out" / "c", tokenizer)
    assert str(caught.value).startswith("The input has 8 unusable documents; nothing was written")
    said = all_refused(caught.value)
    assert [(problem.where.removeprefix(f"{tmp_path}/in.jsonl:"), problem.got) for problem in said] == [
        ("2", "invalid JSON (Unterminated string starting at, column 10)"),
        ("3: field 'text'", "no such field (fields: 'title', 'body')"),
        ("4: field 'text'", "number 7"),
        ("5: field 'text'", "null null"),
        ("6", "a JSON array"),
        ("7", "byte 0xff at byte 10"),
        ("8: field 'text'", said[6].got),
        ("9", "invalid JSON (Expecting value, column 18)"),
    ]
    assert len({problem.key for problem in said}) == 4 and said[6].got.startswith("half a surrogate pair")
    assert "jq" in said[7].do and "jq" not in said[0].do, "only where the file is one array"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_ten_problems_are_listed_and_all_counted(workers: int, tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    filler = {"text": "x " * 2000}
    source = write_jsonl(tmp_path / "in.jsonl", [filler if i % 10 else {} for i in range(1000)])
    with pytest.raises(DataError) as caught:
        run([source], tmp_path / "c", tokenizer, workers=workers)
    lines = str(caught.value).splitlines()
    assert "100 unusable documents (the first 10 follow)" in lines[0]
    assert [line.split(":")[1] for line in lines[1:]] == [str(i) for i in range(1, 100, 10)]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_failure_keeps_older_outputs(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    run([source], tmp_path / "c", tokenizer)
    source.unlink()
    before = files(tmp_path)
    write_jsonl(source, [{"text": "another text"}, {"no": "text"}])
    with pytest.raises(DataError):
        run([source], tmp_path / "c", tokenizer, overwrite=True)
    training = {"train_tokenizer": True, "vocab_size": 300, "overwrite": True}
    with pytest.raises(DataError):
        preprocess(PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "c"), **training))
    source.unlink()
    assert files(tmp_path) == before


def test_a_dataset_is_replaced_only_on_request(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    run([source], tmp_path / "c", tokenizer)
    before = files(tmp_path)
    there = ", ".join(str(tmp_path / f"c{suffix}") for suffix in (".bin", ".idx", ".meta.json", "-tokenizer"))
    with pytest.raises(DataError) as caught:
        run([source], tmp_path / "c", tokenizer)
    assert str(caught.value) == (
        f"output_prefix: got {there}, which are there already, expected nothing of these names; "
        "give another --output-prefix, or replace it with --overwrite"
    )
    assert files(tmp_path) == before
    write_jsonl(source, [{"text": "c"}])
    run([source], tmp_path / "c", tokenizer, overwrite=True)
    assert read(tmp_path / "c") == [tokenizer.encode("c")]
    # Its own copy of the tokenizer may make it again: that is no output then.
    for suffix in (".bin", ".idx", ".meta.json"):
        (tmp_path / f"c{suffix}").unlink()
    report = run([source], tmp_path / "c", tokenizer, tokenizer_model=str(tmp_path / "c-tokenizer"))
    assert report.tokenizer == str(tmp_path / "c-tokenizer" / "tokenizer.model")


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_documents_are_skipped_on_request(workers: int, tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """As many as allowed and no more; a record with several fields goes as a whole; never in silence."""
    filler = "x " * 2000
    records = [{"text": f"{i} {filler}", "title": f"{i}" if i % 10 else None} for i in range(1000)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records[:11]), tmp_path / "in.parquet")
    options = {"workers": workers, "json_keys": ("text", "title")}
    with pytest.raises(DataError, match=r"102 unusable documents, more than --skip-bad-documents 101 \(the first 10 follow\)"):
        run([source, tmp_path / "in.parquet"], tmp_path / "c", tokenizer, skip_bad_documents=101, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.parquet"]
    report = run([source, tmp_path / "in.parquet"], tmp_path / "c", tokenizer, skip_bad_documents=102, **options)
    kept = [*(i for i in range(1000) if i % 10), *range(1, 10)]
    assert read(tmp_path / "c_title_document") == [tokenizer.encode(f"{i}") for i in kept]
    assert IndexedDataset(tmp_path / "c_text_document").num_documents == len(kept)
    said = str(report).splitlines()
    assert said[1] == "warning: 102 unusable documents were left out, the first 10 of them:" and len(said) == 12
    assert said[2] == f"  - {source}:1: field 'title': got null null, expected a string; mend the line or change --json-keys"


def test_a_file_that_ends_too_early_is_no_bad_document(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """Nobody knows how many are missing."""
    cut = compressed(tmp_path / "cut.jsonl.gz", b'{"text": "a"}\n' * 1000)
    cut.write_bytes(cut.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz: got Compressed file ended before"):
        run([cut], tmp_path / "c", tokenizer, skip_bad_documents=1000)


def test_a_tokenizer_that_could_not_be_saved_is_refused_at_once(texts: list[str], tmp_path: Path) -> None:
    """Before any text is read: no checkpoint could keep it, no export have it."""
    model = tmp_path / "tokenizer.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[0].split("\n")),
        model_prefix=str(model.with_suffix("")),
        model_type="unigram",
        vocab_size=100,
        hard_vocab_limit=False,
        user_defined_symbols=["<x>"],
        minloglevel=2,
    )
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    options = PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "c"), tokenizer_model=str(model))
    with pytest.raises(DataError, match=r"tokenizer\.model: got a model that tokenizer\.json cannot express.*\n.*user-defined symbols"):
        preprocess(options)
    assert not list(tmp_path.glob("c*"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_inputs_that_give_nothing(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as caught:
        run([tmp_path / "missing.txt", tmp_path / "folder"], tmp_path / "c", tokenizer)
    assert "missing.txt: got no such file" in str(caught.value)
    assert "folder: got an empty folder" in str(caught.value)
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match="field 'text': got no text in the whole input"):
        run([source], tmp_path / "c", tokenizer)


def test_a_place_that_cannot_be_written(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    with pytest.raises(DataError, match=r"in\.jsonl: got .*, expected a place for the dataset; make room, or give another --output-prefix"):
        run([source], source / "c", tokenizer)


def test_options_that_do_not_go_together() -> None:
    options = PreprocessConfig(output_prefix="out/", json_keys=("a", "a"), workers=-1, skip_bad_documents=-1)
    with pytest.raises(ConfigError) as caught:
        preprocess(options)
    for part in ("input: got nothing", "output_prefix: got 'out/'", "json_keys: got", "workers: got -1", "skip_bad_documents: got -1", "tokenizer: got neither"):
        assert part in str(caught.value)
    options = PreprocessConfig(
        input=("x",), output_prefix="o", train_tokenizer=True, tokenizer_model="t", tokenizer_type="HuggingFaceTokenizer", vocab_size=1000
    )
    with pytest.raises(ConfigError) as caught:
        preprocess(options)
    assert "tokenizer: got both" in str(caught.value)
    assert "tokenizer_type: got HuggingFaceTokenizer" in str(caught.value)


def test_end_token_is_needed_for_append_eod(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save_hf(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    bare = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    bare["added_tokens"] = []
    vocabulary = bare["model"]["vocab"]
    vocabulary["<end>"] = vocabulary.pop("</s>")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(bare))
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a b"}])
    with pytest.raises(DataError, match=r"tokenizer\.json: got no end token, expected one, for --append-eod"):
        run([source], tmp_path / "c", tokenizer, tokenizer_model=str(tmp_path / "hf"), append_eod=True)


def compressed(path: Path, content: bytes) -> Path:
    """Two members, as ``cat a.gz b.gz`` and parallel compressors write them, cut inside a line."""
    pack = gzip.compress if path.suffix == ".gz" else zstandard.ZstdCompressor().compress
    middle = len(content) // 2
    path.write_bytes(pack(content[:middle]) + pack(content[middle:]))
    return path


def test_every_format_gives_the_same_documents(texts: list[str], tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """Compressed lines and parquet as plain lines, over many chunks, with exact counts."""
    records = [{"id": f"{i}", "text": f"{i} {text}" if i % 50 else ""} for i, text in enumerate(texts * 4)]
    plain = write_jsonl(tmp_path / "a.jsonl", records)
    table = pyarrow.Table.from_pylist(records)
    assert plain.stat().st_size > CHUNK_BYTES
    files = {"plain": plain, "dictionary": tmp_path / "d.parquet", "parquet": tmp_path / "p.parquet"}
    parquet.write_table(table, files["parquet"], row_group_size=70)
    parquet.write_table(table.set_column(1, "text", table["text"].dictionary_encode()), files["dictionary"])
    for suffix in (".gz", ".zst"):
        files[suffix] = compressed(tmp_path / f"c.jsonl{suffix}", plain.read_bytes())
    reports = {name: run([file], tmp_path / f"out{name}", tokenizer, workers=1 + (name == "parquet")) for name, file in files.items()}
    for name, report in reports.items():
        assert (tmp_path / f"out{name}.bin").read_bytes() == (tmp_path / "outplain.bin").read_bytes(), name
        assert (tmp_path / f"out{name}.idx").read_bytes() == (tmp_path / "outplain.idx").read_bytes(), name
        assert report.documents + report.skipped == len(records) and report.skipped == reports["plain"].skipped > 0
        assert report.bytes == files[name].stat().st_size


def test_compressed_text_is_one_document(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    files = [compressed(tmp_path / f"a.txt{suffix}", b"one\ntwo\n") for suffix in (".gz", ".zst")]
    run(files, tmp_path / "c", tokenizer)
    assert read(tmp_path / "c") == [tokenizer.encode("one\ntwo\n")] * 2


def test_every_problem_of_compressed_files_and_tables_is_told(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """With the number of the line or row, and all of them at once. A file that is cut off is never taken for a shorter one."""
    lines = "".join(json.dumps({"text": str(number) * 50}) + "\n" for number in range(5000)).encode()
    inputs = []
    for suffix in (".gz", ".zst"):
        inputs.append(compressed(tmp_path / f"cut.jsonl{suffix}", lines))
        inputs[-1].write_bytes(inputs[-1].read_bytes()[:-7])
        inputs.append(tmp_path / f"wrong.jsonl{suffix}")
        inputs[-1].write_bytes(b"not compressed at all")
        inputs.append(compressed(tmp_path / f"line.jsonl{suffix}", b'{"text": "a"}\n{"text": 7}\n'))
    for name, columns in {"column": {"body": ["a"]}, "type": {"text": [1]}, "null": {"text": ["a", None, "b"]}}.items():
        inputs.append(tmp_path / f"{name}.parquet")
        parquet.write_table(pyarrow.table(columns), inputs[-1])
    inputs.append(tmp_path / "wrong.parquet")
    inputs[-1].write_bytes(b"PAR1")
    with pytest.raises(DataError) as error:
        run(inputs, tmp_path / "c", tokenizer)
    text = str(error.value)
    for says in (
        "10 unusable documents",
        "cut.jsonl.gz: got Compressed file ended before",
        "wrong.jsonl.gz: got Not a gzipped file",
        "line.jsonl.gz:2: field 'text': got number 7",
        "cut.jsonl.zst: got the file ends inside a frame",
        "wrong.jsonl.zst: got ",
        "line.jsonl.zst:2: field 'text': got number 7",
        "column.parquet: column 'text': got no such column (columns: 'body'), expected strings",
        "type.parquet: column 'text': got int64, expected strings",
        "null.parquet: row 2, column 'text': got null, expected a string",
        "wrong.parquet: got ",
    ):
        assert says in text, text
    assert not list(tmp_path.glob("c.*"))


def test_a_package_that_is_missing_is_named(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    """In a process where the two cannot be imported, as if they were not installed."""
    for name in ("a.jsonl.zst", "b.parquet", "c.parquet"):
        (tmp_path / name).write_bytes(b"")
    argv = ["preprocess", "--input", str(tmp_path), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", str(tokenizer.path)]
    program = f"import sys; sys.modules.update(zstandard=None, pyarrow=None)\nfrom megatron_llama.cli import main; sys.exit(main({argv}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"{tmp_path}/a.jsonl.zst: got no package zstandard, expected it installed, to read .zst; pip install '.[zstd]'" in ended.stderr
    assert f"{tmp_path}/b.parquet: got no package pyarrow, expected it installed, to read .parquet; pip install" in ended.stderr
