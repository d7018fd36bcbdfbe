"""Tokens of examples on the disk: what is kept is what was read, whatever happens to the files or to who writes them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.data.corpus import docstring_pairs
from megatron_llama.data.loader import Batch
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import DataError
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.prove.pool import Place
from megatron_llama.tune.preference import dataset as preferences
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import PairSamples, read_pairs
from megatron_llama.tune.preference.option_problems import objective_fields
from megatron_llama.tune.preference.run import PairData
from megatron_llama.tune.sft import dataset, fingerprint, token_store
from megatron_llama.tune.sft import run as runs
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import Examples, ExampleSamples, read_examples
from megatron_llama.tune.sft.run import ExampleData
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.token_store import META

from tests.harness import Cluster
from tests.launcher import Launcher

SEQ_LENGTH = 256
COUNT = 90
ROUND = 8
"""Examples are many rounds."""
KINDS = ("sft", "dpo", "kto")
Opened = ExampleData | PairData


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "ROUND", ROUND)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Questions of documentation with their answers."""
    return [*islice(docstring_pairs(), COUNT)]


@pytest.fixture
def file(found: list[tuple[str, str]], tmp_path: Path) -> Path:
    """The questions with a right and a wrong answer, in every kind's fields; some that are too long, some that are no examples."""
    lines = [
        json.dumps({"prompt": question, "completion": right, "chosen": right, "rejected": wrong})
        for (question, right), (_, wrong) in zip(found, [*found[1:], found[0]], strict=True)
    ]
    lines[5], lines[50] = "{", '{"prompt": 3}'
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "talk.jsonl"


def config_of(folder: Path, vocab_size: int, **more: Any) -> Config:
    model = ModelConfig(vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    data = DataConfig(data_cache_path=str(folder), split="80,20,0")
    return Config(model=model, data=data, training=TrainingConfig(seq_length=SEQ_LENGTH, **more))


def options_of(kind: str, file: Path, **more: Any) -> SFTConfig:
    given = {"train_data": (str(file),), "on_bad_sample": "drop", "packing": True, "data_format": "prompt"}
    others = ("chosen", "rejected") if kind == "sft" else ("completion",)
    return SFTConfig(**{**given, "ignore_keys": others, **more})


def opened(kind: str, file: Path, folder: Path, chat: ChatTokenizer, world: Axis | None = None, **more: Any) -> Opened:
    """What a start of a run opens."""
    world, config, options = world or Mesh.single().world, config_of(folder, chat.vocab_size), options_of(kind, file, **more)
    if kind == "sft":
        return ExampleData(options, config, world, chat)
    return PairData(options, AlignConfig(method=kind, preference_format="trl"), config, world, chat)  # type: ignore[arg-type]


def samples_in_memory(kind: str, file: Path, chat: ChatTokenizer) -> tuple[Examples, ExampleSamples | PairSamples]:
    """All examples in memory and samples of the training share: what a start is to give, without a store."""
    options = options_of(kind, file)
    if kind == "sft":
        examples = read_examples([file], chat, options, SEQ_LENGTH)
        return examples, ExampleSamples(examples, range(round(0.8 * len(examples))), SEQ_LENGTH, packing=True)
    align = AlignConfig(method=kind, preference_format="trl")  # type: ignore[arg-type]
    pairs = read_pairs([file], chat, options, align, SEQ_LENGTH)
    chosen = range(round(0.8 * len(pairs)))
    return pairs, PairSamples(pairs, chosen, SEQ_LENGTH, packing=True, method=align.method, objective=objective_fields(align))


def assert_same(found: Batch, expected: Batch) -> None:
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, Batch):
            assert_same(other, value)
        else:
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name


def entries(folder: Path) -> list[Path]:
    return sorted((folder / runs.STORE).iterdir())


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*words: object) -> None:
        raise AssertionError("an example was encoded")

    for name in ("read", "read_prompt"):
        monkeypatch.setattr(ChatTokenizer, name, read)
    monkeypatch.setattr(preferences, "encode_preference", read)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_examples_in_memory(
    kind: str, file: Path, tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from a first start and from a second, which encodes nothing and says the same of the examples."""
    examples, expected = samples_in_memory(kind, file, chat)
    assert len(examples.problems) >= 2 and len(expected) > 10 and examples.truncated > 0
    lines = []
    for start in range(2):
        data = opened(kind, file, tmp_path / "cache", chat)
        config = config_of(tmp_path / "cache", chat.vocab_size)
        samples = data.samples(config, 0)
        assert samples.identity() == expected.identity() and len(samples) == len(expected)
        for at in range(0, len(expected) - 3, 3):
            assert_same(samples.batch(range(at, at + 3)), expected.batch(range(at, at + 3)))
        first, *rest = data.report(config)
        [entry] = entries(tmp_path / "cache")
        assert first.endswith(f"{'from an earlier start, in' if start else 'kept in'} {entry}")
        for column in (data._read[0].ids, data._read[0].loss_mask):
            values = column.values  # type: ignore[attr-defined]
            assert isinstance(values.base, np.memmap) and not values.flags.writeable, "a start holds views of files"
            assert np.shares_memory(column[3], values)
        said = [*examples.report()]
        assert rest[: len(said)] == said
        lines.append(rest)
        forbid_reading(monkeypatch)
    assert lines[0] == lines[1]


def changed_tokenizer(chat: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """The same tokens, of which one merge is not made."""
    content = json.loads(chat._reader._content)
    content["model"]["merges"].pop()
    (folder / "other").mkdir()
    (folder / "other" / "tokenizer.json").write_text(json.dumps(content))
    (folder / "other" / "tokenizer_config.json").write_text(json.dumps(chat._reader._named))
    return ChatTokenizer(HFTokenizer(folder / "other" / "tokenizer.json"), "llama3")


def copied_tokenizer(chat: ChatTokenizer, folder: Path) -> ChatTokenizer:
    chat._tokenizer.save_hf(folder)
    return ChatTokenizer(HFTokenizer(folder / "tokenizer.json"), "llama3")


MATTERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "a byte of the file": lambda start, folder: Path(start["file"]).write_bytes(Path(start["file"]).read_bytes().replace(b"a", b"b", 1)),
    "the file's path": lambda start, folder: start.update(file=Path(start["file"]).rename(folder / "moved.jsonl")),
    "the template": lambda start, folder: start.update(chat=ChatTokenizer(start["chat"]._tokenizer, "chatml")),
    "the tokenizer": lambda start, folder: start.update(chat=changed_tokenizer(start["chat"], folder)),
    "the loss": lambda start, folder: start.update(loss_on="all"),
    "long examples": lambda start, folder: start.update(on_long_sample="drop"),
    "fields that are not read": lambda start, folder: start.update(ignore_keys=("completion", "x")),
    "repairs": lambda start, folder: start.update(repair_conversations=("merge-repeated-roles",)),
    "the method": lambda start, folder: start.update(kind="reward"),
}
NOTHING: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "packing": lambda start, folder: start.update(packing=False),
    "noise": lambda start, folder: start.update(neftune_noise_alpha=5.0),
    "the same content written again": lambda start, folder: Path(start["file"]).write_bytes(Path(start["file"]).read_bytes()),
    "a copy of the tokenizer": lambda start, folder: start.update(chat=copied_tokenizer(start["chat"], folder / "copy")),
}


@pytest.mark.parametrize("change", [*MATTERS, *NOTHING])
def test_what_tokens_depend_on(change: str, file: Path, tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    start: dict[str, Any] = {"kind": "dpo", "file": file, "folder": tmp_path / "cache", "chat": chat}
    opened(**start)
    (MATTERS | NOTHING)[change](start, tmp_path)
    if change in NOTHING:
        forbid_reading(monkeypatch)
    opened(**start)
    assert len(entries(tmp_path / "cache")) == 1 + (change in MATTERS)


def test_numbers_of_the_run_and_code_matter(file: Path, tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    config, world = config_of(tmp_path / "cache", chat.vocab_size), Mesh.single().world
    ExampleData(options_of("sft", file), config, world, chat)
    ExampleData(options_of("sft", file), replace(config, training=replace(config.training, seq_length=SEQ_LENGTH + 1)), world, chat)
    ExampleData(options_of("sft", file), replace(config, model=replace(config.model, vocab_size=2 * chat.vocab_size)), world, chat)
    ExampleData(options_of("sft", file), config, world, chat, "2001-02-03")
    assert len(entries(tmp_path / "cache")) == 4
    package = Path(fingerprint.megatron_llama.__file__).parent
    assert all(any((package / room).glob("*.py")) for room in fingerprint.ROOMS)
    other = tmp_path / "package"
    (other / "tune" / "sft").mkdir(parents=True)
    (other / "tune" / "sft" / "chat.py").write_text("a mended line\n")
    monkeypatch.setattr(fingerprint.megatron_llama, "__file__", str(other / "__init__.py"))
    before = fingerprint.code_digest()
    (other / "tune" / "sft" / "chat.py").write_text("another line\n")
    assert fingerprint.code_digest() != before
    ExampleData(options_of("sft", file), config, world, chat)
    assert len(entries(tmp_path / "cache")) == 5


@pytest.mark.few(6)
@pytest.mark.parametrize("how", ["a bit", "cut", "removed"])
@pytest.mark.parametrize("name", ["ids", "loss_mask", "lengths", "prompts", "kinds", META])
def test_a_damaged_entry_is_made_again(name: str, how: str, file: Path, tmp_path: Path, chat: ChatTokenizer) -> None:
    opened("kto", file, tmp_path / "cache", chat)
    [entry] = entries(tmp_path / "cache")
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    content = bytearray((entry / name).read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    (entry / name).unlink() if how == "removed" else (entry / name).write_bytes(content if how == "a bit" else content[:middle])
    opened("kto", file, tmp_path / "cache", chat)
    assert entries(tmp_path / "cache") == [entry] and {path.name: path.read_bytes() for path in entry.iterdir()} == before


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_llama.tune.sft import dataset
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.token_store import TokenWriter
from megatron_llama.data.tokenizer.hf import HFTokenizer
from tests.tune.sft import test_token_store as tests

moment, file, folder, tokenizer = sys.argv[1], *map(Path, sys.argv[2:])
dataset.ROUND = tests.ROUND
added = TokenWriter.add


def add(writer, columns):
    added(writer, columns)
    if moment == "in the middle" and writer._columns["lengths"]["count"] > tests.COUNT // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def rename(path, target):
    os.kill(os.getpid(), signal.SIGKILL)


TokenWriter.add = add
if moment == "before the rename":
    Path.rename = rename
tests.opened("sft", file, folder, ChatTokenizer(HFTokenizer(tokenizer), "llama3"))
"""


@pytest.mark.long
@pytest.mark.parametrize("moment", ["in the middle", "before the rename"])
def test_a_writer_that_is_killed_leaves_no_entry(
    moment: str, launcher: Launcher, file: Path, tmp_path: Path, chat: ChatTokenizer, llama3: Path
) -> None:
    folder = tmp_path / "cache"
    assert launcher.run([moment, file, folder, llama3 / "tokenizer.json"], code=KILLED).codes == (-signal.SIGKILL,)
    [left] = entries(folder)
    assert left.name.startswith(".tmp-") and (left / "ids").is_file()
    _, expected = samples_in_memory("sft", file, chat)
    data = opened("sft", file, folder, chat)
    assert data.samples(config_of(folder, chat.vocab_size), 0).identity() == expected.identity()
    # It may belong to a run that still writes.
    assert left in entries(folder)
    for path in (left, *left.iterdir()):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    opened("sft", file, folder, chat, loss_on="all")
    assert left not in entries(folder) and len(entries(folder)) == 2


def test_a_file_that_changes_while_it_is_read(file: Path, tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    read, times = ChatTokenizer.read, iter(range(COUNT))

    def and_change(self: ChatTokenizer, *words: Any) -> Any:
        if next(times) == COUNT // 2:
            with file.open("a") as more:
                more.write('{"prompt": "What is", "completion": " new."}\n')
        return read(self, *words)

    monkeypatch.setattr(ChatTokenizer, "read", and_change)
    with pytest.raises(DataError, match=rf"{file}: got a file that changed while it was read"):
        opened("sft", file, tmp_path / "cache", chat)
    assert entries(tmp_path / "cache") == []


def test_a_disk_without_room(file: Path, tmp_path: Path, chat: ChatTokenizer) -> None:
    """It is one error, wherever in a file the room ends, and what was written makes room again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 300, 5000, 20000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(DataError, match="got File too large, expected a folder that keeps the tokens of examples"):
                opened("kto", file, tmp_path / "cache", chat)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert entries(tmp_path / "cache") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a folder that keeps the tokens of examples; give another --data-cache-path"):
        opened("sft", file, tmp_path / "file", chat)


def test_two_runs_that_find_the_same_damage(file: Path, tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One removes the entry while the other looks at its files."""
    opened("sft", file, tmp_path / "cache", chat)
    [entry] = entries(tmp_path / "cache")
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    (entry / "ids").write_bytes((entry / "ids").read_bytes()[:-1] + b"\x7f")
    digest = token_store._digest

    def and_lose(path: Path) -> str:
        shutil.rmtree(entry, ignore_errors=True)
        return digest(path)

    monkeypatch.setattr(token_store, "_digest", and_lose)
    opened("sft", file, tmp_path / "cache", chat)
    assert entries(tmp_path / "cache") == [entry] and {path.name: path.read_bytes() for path in entry.iterdir()} == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "content"), [("blank.jsonl", "\n\n"), ("none.json", "[]")])
def test_files_without_a_record(kind: str, name: str, content: str, file: Path, tmp_path: Path, chat: ChatTokenizer) -> None:
    """And those with problems: a second start is stopped, too."""
    said = set[str]()
    for _ in range(2):
        with pytest.raises(DataError, match="examples cannot be used") as error:
            opened(kind, file, tmp_path / "cache", chat, on_bad_sample="stop")
        said.add(str(error.value))
    assert len(said) == 1
    (tmp_path / name).write_text(content)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{name}: got no example that can be used \(0 cannot, 0 are too long\)"):
            opened(kind, tmp_path / name, tmp_path / "cache", chat)


def open_in(place: Place, kind: str, files: list[Path], folders: list[Path], tokenizer: Path) -> tuple[str, str]:
    """On machines that have these files and folders."""
    dataset.ROUND = ROUND
    machine = place.rank * len(folders) // place.world_size
    runs.machine_name = lambda: f"machine {machine}"  # type: ignore[assignment]
    config = Config(parallel=ParallelConfig())
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    chat = ChatTokenizer(HFTokenizer(tokenizer), "llama3")
    try:
        data = opened(kind, files[machine], folders[machine], chat, mesh.world)
    except DataError as error:
        return "", str(error)
    return data.samples(config_of(folders[machine], chat.vocab_size), 0).identity()["digest"], next(
        data.report(config_of(folders[machine], chat.vocab_size))
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "kto"])
def test_ranks_write_together(kind: str, cluster: Cluster, file: Path, tmp_path: Path, chat: ChatTokenizer, llama3: Path) -> None:
    """Four ranks of one machine give what one gives, byte for byte; of two machines one knows the tokens already."""
    _, expected = samples_in_memory(kind, file, chat)
    opened(kind, file, tmp_path / "one", chat)
    [alone] = entries(tmp_path / "one")
    before = {path.name: path.read_bytes() for path in alone.iterdir()}
    for folders, said in (
        ([tmp_path / "four"], "kept in"),
        ([tmp_path / "four", tmp_path / "second"], "kept in"),
        ([tmp_path / "second"], "earlier"),
    ):
        found = cluster.run(4, open_in, kind, [file] * 2, folders, llama3 / "tokenizer.json")
        assert all(digest == expected.identity()["digest"] and said in line for digest, line in found), found
        for folder in folders:
            [entry] = entries(folder)
            assert entry.name == alone.name and {path.name: path.read_bytes() for path in entry.iterdir()} == before


def test_machines_with_other_files(cluster: Cluster, file: Path, tmp_path: Path, llama3: Path) -> None:
    other = tmp_path / "machine 1" / file.name
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    folders = [tmp_path / "a", tmp_path / "b"]
    found = cluster.run(4, open_in, "sft", [file, other], folders, llama3 / "tokenizer.json")
    assert all("machines that differ in files (that of rank 2 from that of rank 0)" in said for _, said in found) and not any(
        folder.exists() for folder in folders
    )
