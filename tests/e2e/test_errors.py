"""What users get wrong: one message with the remedy, the right exit status on every rank, and nothing touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from safetensors.torch import load_file, save_file

from tests.e2e.product import (
    DP2,
    EVALUATED,
    INTERLEAVED,
    ONE,
    SEQ_LENGTH,
    TP2,
    Layout,
    Product,
    Refuse,
    contents,
    copy_dataset,
    exact_curve,
    words,
)
from tests.launcher import ROOT, TIMEOUT, Finished
from tests.refused import refused

TWO = Layout(2, {})


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """A section that leaves a folder as it was, on every path."""
    before = contents(folder), sorted(folder.rglob("*"))
    yield
    assert (contents(folder), sorted(folder.rglob("*"))) == before


def launched(product: Product, folder: Path, layout: Layout = ONE, *, code: int, **changes: Any) -> str:
    """The complaint about a run of real processes with these options, which leaves ``folder`` as it was."""
    with untouched(folder):
        ended = product.start(layout, **{"save": folder / "new", **changes}).wait()
        assert set(ended.codes) == {code}, ended
    return complaint(ended)


def complaint(ended: Finished) -> str:
    assert "Traceback" not in ended.err and "Warning" not in ended.err, ended.err
    return ended.err


CONFIGURATIONS: Mapping[str, tuple[int, dict[str, object], str]] = {
    "heads and tp": (
        3,
        {"tensor_model_parallel_size": 3, "num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 96},
        "train.setup.checks.parallel.parallel_problems:3",
    ),
    "layers and pp": (3, {"pipeline_model_parallel_size": 3}, "train.setup.checks.parallel._pipeline_problems:2"),
    "microbatches of an interleaved schedule": (2, {**INTERLEAVED.options, "global_batch_size": 6}, "schedule.builders._microbatch_problems:2"),
    "processes": (3, {"tensor_model_parallel_size": 2}, "config.world.world_problem:2"),
    "no data": (1, {"data_path": None, "vocab_size": 512}, "train.setup.resolve.check"),
    "unknown flag": (1, {"micro_batchsize": 2}, "config.parse._Reader._refuse_unknown:2"),
    "unknown model": (1, {"model": "llama3-8"}, "train.setup.resolve._preset"),
    "steps": (1, {"train_iters": 0}, "config.batch_ramp.length_problems:3"),
    "vocabulary": (1, {"vocab_size": 300}, "train.setup.vocabulary.with_vocabulary:3"),
    "yaml": (1, {"config": "{folder}/bad.yaml"}, "config.parse._Reader._yaml_keys:2"),
}
"""One of each kind, which the first process knows from words, files or their number: ``tests/train/setup/test_resolve.py`` and
``tests/config/test_parse.py`` have the others."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_wrong_configurations_exit_with_2(name: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    processes, changes, key = CONFIGURATIONS[name]
    (tmp_path / "bad.yaml").write_text("lr: 1e-3\nseq_length: [32\nmicro_batch_size: 2\n")
    changes = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
    with untouched(tmp_path):
        text = refuse(product.command(**{"save": tmp_path / "new", **changes}), code=2, processes=processes)
    assert refused(text).key == key, "said once, by rank 0"


EXACT = {"optimizer_offload": "exact", "offload_speculative": True}
TRACED = {"record_timeline": "run.json", "profile_step_start": 2}
REFUSED: tuple[tuple[dict[str, object], tuple[str, ...]], ...] = (
    ({"on_bad_step": "skip", "clip_grad": 0}, ("--on-bad-step skip: got --clip-grad 0, expected ",)),
    ({"on_bad_step": "rollback"}, ("--on-bad-step rollback: got no --save and --save-interval, expected ",)),
    ({"on_bad_step": "rollback", "save": "x"}, ("--on-bad-step rollback: got no --save-interval, expected ",)),
    ({"on_bad_checkpoint": "rollback", "save": "x"}, ("--on-bad-checkpoint rollback: got no --save-interval, expected ",)),
    ({"loss_spike_factor": 0.5, "loss_spike_window": 0}, ("--loss-spike-factor: got 0.5, ", "--loss-spike-window: got 0, ")),
    ({**EXACT, "offload_cores": "7-3"}, ("--offload-cores: got 7-3, expected auto, or numbers and ranges such as 0-15,32-47; ",)),
    ({**EXACT, "offload_cores": "0-99999999999"}, ("--offload-cores: got 0-99999999999, expected auto, or numbers and ranges",)),
    ({**EXACT, "offload_cores": "4000"}, ("--offload-cores: got 4000, expected processors that this process may use: ",)),
    ({**EXACT, "optimizer_offload_fraction": 1.5}, ("--optimizer-offload-fraction: got 1.5, expected a number from 0 to 1; ",)),
    ({**EXACT, "speculation_bytes": -1}, ("--speculation-bytes: got -1, expected 0 or more",)),
    *(({"open_metrics": text}, (f"--open-metrics: got {text}, expected PORT or ADDRESS:PORT",)) for text in ("many", "0", "65536", "host:")),
    (
        {"lora_rank": -1, "lora_alpha": 0, "lora_dropout": 0.1, "lora_target_modules": ("q_proj", "embed")},
        ("--lora-rank: got -1", "--lora-alpha: got 0", "--lora-dropout: got 0.1", "--lora-target-modules: got embed"),
    ),
    (
        {"rampup_batch_size": (3, 1, 10), "train_samples": 100, "lr_decay_style": "WSD", "data_path": (0.5, "a", "b", "c")},
        ("batch-size: got 3 1 10", "got --train-samples 100 and --train-iters 6", "decay-iters: got 0", "--data-path: got 0.5 a b c"),
    ),
    ({"profile": True, "profile_step_start": 5, "profile_step_end": 5}, ("--profile-step-end: got 5, expected more than profile_step_start 5",)),
    ({**TRACED, "profile_step_end": 2}, ("--profile-step-end: got 2, expected more than profile_step_start 2",)),
    ({**TRACED, "profile_step_start": 6, "profile_step_end": 7}, ("--profile-step-start: got 6, expected less than train_iters 6",)),
)


@pytest.mark.tries("lora_dropout")
def test_options_that_cannot_work_are_named(product: Product, refuse: Refuse) -> None:
    for changes, says in REFUSED:
        said = refuse(product.command(**changes), code=2)
        assert [words for words in says if words not in said] == [], said


def test_what_rank_0_refuses_it_says_alone(product: Product, tmp_path: Path) -> None:
    """Rank 0 looks for the start; the others learn its answer, raise it, and leave without a word."""
    ended = product.start(Layout(3, {"global_batch_size": 6}), load=tmp_path / "none", save=tmp_path / "new").wait()
    assert len(set(ended.codes)) == 1 and ended.codes[0] != 0, ended
    said, *others = ended.errs
    assert said.startswith(f"error: --load {tmp_path}/none: got no such folder, ") and said.count("\n") == 1
    assert others == ["", ""] and not any(tmp_path.iterdir())


def test_all_problems_are_said_at_once(product: Product, refuse: Refuse) -> None:
    changes = {"num_query_groups": 3, "pipeline_model_parallel_size": 3, "global_batch_size": 0, "train_iters": -1, "adam_beta1": 2}
    text = refuse(product.command(**changes), code=2)
    assert [
        word for word in ("--num-key-value-heads", "--pipeline-model", "processes:", "--train-iters", "--adam-beta1") if word not in text
    ] == []
    assert len(re.findall(r"^  - .*: got .*, expected .*; ", text, re.M)) >= 5


def copied(product: Product, prefix: Path) -> Path:
    """The dataset without its tokenizer, to damage."""
    return copy_dataset(product.data, prefix)


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def without_tokens(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16):
        pass


DAMAGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "no tokens": (without_tokens, "data.indexed.IndexedDataset._check_sequences:2"),
    "short bin": (lambda prefix: cut(prefix.with_suffix(".bin"), 1000), "data.indexed.IndexedDataset._check_sequences:3"),
    "strange meta": (lambda prefix: Path(f"{prefix}.meta.json").write_text("[1"), "config.json_file.parse_json_object:4"),
}
"""One of each file, and one of which no file is damaged: ``tests/data/test_indexed.py`` has the others."""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_datasets_end_every_rank(name: str, product: Product, tmp_path: Path) -> None:
    damage, key = DAMAGES[name]
    damage(copied(product, tmp_path / "docs"))
    said = refused(launched(product, tmp_path, TWO, code=1, data_path=tmp_path / "docs"))
    assert said.key == key and said.where.startswith(f"{tmp_path}/docs.")


def test_no_dataset(product: Product, refuse: Refuse) -> None:
    said = refused(refuse(product.command(data_path=f"{product.data}.bin", vocab_size=512), code=1))
    assert (said.where, said.got) == (f"{product.data}.bin.idx", "no such file") and "prefix" in said.do


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_wrong_token_that_one_rank_meets_in_the_middle(rank: int, product: Product, tmp_path: Path) -> None:
    """Samples in file order: the two of the fourth step's first microbatch on that rank are 24 + 2 * rank and the next."""
    prefix = copied(product, tmp_path / "docs")
    at, dataset = (24 + 2 * rank) * SEQ_LENGTH + 7, IndexedDataset(prefix)
    document = dataset.document_at(at)
    token = at - dataset.document_start(document)
    del dataset
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r+")
    tokens[at] = 777
    tokens.flush()
    ended = product.launcher.run(product.command(data_path=prefix, data_order="sequential", save=tmp_path / "run", **DP2.options), 2)
    assert ended.codes == (1, 1)
    says = f"rank {rank}: {prefix}.bin: document {document}, token {token}: got id 777, expected 0 to 511; "
    assert says in complaint(ended) and ended.err.count(says) == 1
    assert " iteration 3/" in ended.out and " iteration 4/" not in ended.out
    assert not list((tmp_path / "run").glob("iter_*"))


@pytest.mark.long
def test_one_flipped_bit_in_the_data_ends_every_rank(product: Product, tmp_path: Path) -> None:
    """A rank that reads beside the steps finds it, whether a sample has the token or not. No step is slow enough to wait for:
    the run is longer than the reading."""
    prefix = tmp_path / "docs"
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(f"{product.data}{suffix}", f"{prefix}{suffix}")
    stream = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r+")
    stream[-5] ^= 1
    stream.flush()
    ended = product.launcher.run(product.command(data_path=prefix, train_iters=500, save=tmp_path / "run", **DP2.options), 2)
    assert ended.codes == (1, 1)
    says = f"rank 0: {prefix}.bin: bytes 0 to {2 * len(stream)}: got the SHA-256 "
    assert says in complaint(ended) and ended.err.count(says) == 1
    assert " iteration 500/" not in ended.out


PREPROCESS: Mapping[str, tuple[str, int, list[str], str]] = {
    "no json": ('{"text": "one"}\n{"text": \n', 1, [], "data.documents._read_line"),
    "no text": ("\n\n", 1, [], "data.preprocess._write"),
    "two tokenizers": ('{"text": "one"}\n', 2, ["--train-tokenizer"], "data.preprocess._check_options:6"),
}
"""A document, the whole, and the words: ``tests/data`` has the others."""


PRESS = """
import os, signal, sys

class Press:
    def find_spec(self, name, path, target=None):
        if name == "torch.export":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
"""


def test_control_c_while_torch_is_imported(tmp_path: Path) -> None:
    """That import cannot be begun again in the same process."""
    (tmp_path / "sitecustomize.py").write_text(PRESS)
    command = [sys.executable, "-m", "megatron_llama", "export", "--load", str(tmp_path), "--output", str(tmp_path / "hf")]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=TIMEOUT)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_control_c_is_one_word(product: Product, tmp_path: Path) -> None:
    """And nothing is left of what was begun."""
    (tmp_path / "docs.jsonl").write_text(('{"text": "' + "some words " * 1000 + '"}\n') * 4000)
    options = {"input": tmp_path / "docs.jsonl", "output_prefix": tmp_path / "out", "tokenizer_model": f"{product.data}-tokenizer", "workers": 2}
    run = product.launcher.start(["preprocess", *words(options)])
    run.until(lambda: any(path.stat().st_size for path in tmp_path.glob("out.bin.tmp-*")))
    run.signal(Signals.SIGINT)
    ended = run.wait()
    assert ended.codes == (130,) and ended.err == "interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocess_refuses(name: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    content, code, more, key = PREPROCESS[name]
    (tmp_path / "docs.jsonl").write_text(content)
    tokenizer = ["--tokenizer-model", f"{product.data}-tokenizer"]
    command = ["preprocess", "--input", tmp_path / "docs.jsonl", "--output-prefix", tmp_path / "out", "--workers", 1, *tokenizer, *more]
    assert refused(refuse(command, code=code)).key == key
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


def test_a_damaged_checkpoint(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(straight("one"), tmp_path / "run")
    (file,) = (tmp_path / "run" / "iter_0000006").glob("*.distcp")
    cut(file, file.stat().st_size // 2)
    text = launched(product, tmp_path, TWO, code=1, save=tmp_path / "run", load=tmp_path / "run", train_iters=8)
    assert f"{file}: got {file.stat().st_size} bytes" in text


@pytest.mark.long
@pytest.mark.parametrize("full", [pytest.param((0,), marks=pytest.mark.long), (1,), pytest.param((0, 1), marks=pytest.mark.long)], ids=str)
def test_a_full_disk(full: tuple[int, ...], product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The save fails on every rank, the checkpoint before it stays, and the run can go on from it when there is room."""
    product.train(DP2, save=tmp_path, train_iters=3, **EVALUATED)
    before = contents(tmp_path / "iter_0000003")
    command = product.command(save=tmp_path, load=tmp_path, **EVALUATED, **DP2.options)
    ended = product.launcher.start(command, 2, file_bytes=dict.fromkeys(full, 200_000)).wait()
    assert ended.codes == (1, 1)
    assert re.search(rf"{tmp_path}/iter_0000006\.[0-9a-f]+\.incomplete/\S+: got File too large, expected to write it; free space", complaint(ended))
    assert contents(tmp_path / "iter_0000003") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best", "events.jsonl", "iter_0000003", "last", "latest_checkpointed_iteration.txt", "log.jsonl", "tokenizer",
    ]
    product.train(DP2, save=tmp_path, load=tmp_path, **EVALUATED)
    assert exact_curve(tmp_path) == exact_curve(straight("dp2 optim_grads"))


def test_a_save_folder_that_is_a_file(product: Product, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path}/file" in launched(product, tmp_path, TWO, code=1, save=tmp_path / "file")


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param(ONE, marks=pytest.mark.long), TP2, pytest.param(DP2, marks=pytest.mark.long)])
def test_a_loss_that_is_not_finite(layout: Layout, product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The step is named, the weights of the last save stay, nothing is saved."""
    shutil.copytree(straight("one"), tmp_path / "run")
    before = contents(tmp_path / "run" / "iter_0000006")
    command = product.command(
        save=tmp_path / "run", load=tmp_path / "run", train_iters=12, lr=1e38, save_interval=3, lr_decay_style="constant", **layout.options
    )
    ended = product.launcher.run(command, layout.processes)
    assert set(ended.codes) == {1}
    assert re.fullmatch(
        r"error: (loss|gradient norm) at iteration 8: got (nan|inf), expected a finite number; lower --lr, .*\n", complaint(ended)
    )
    assert contents(tmp_path / "run" / "iter_0000006") == before
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_0000006"]
    again = tmp_path / "run" / "log.jsonl"
    assert max(json.loads(line)["iteration"] for line in again.read_text().splitlines()) == 7


@pytest.fixture(scope="module")
def infinite(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HuggingFace folder with one weight that is not finite."""
    folder = shutil.copytree(exported, tmp_path_factory.mktemp("infinite") / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "SHA256SUMS").unlink()
    return folder


@pytest.mark.long
def test_weights_that_are_not_finite(product: Product, infinite: Path, tmp_path: Path) -> None:
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
    ended = product.launcher.run(product.command(init_from_hf=infinite, save=tmp_path, **shape, **EVALUATED, **DP2.options), 2)
    assert ended.codes == (1, 1) and "error: validation loss at iteration 0: got nan, expected a finite number; " in complaint(ended)
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.long
def test_one_flipped_bit_of_the_first_weights_ends_every_rank(product: Product, exported: Path, tmp_path: Path) -> None:
    """The run trains while the files are compared, and waits for that before it keeps anything, at its first save or at its end."""
    folder = shutil.copytree(exported, tmp_path / "hf")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # the last bits of a weight's mantissa: it computes like the others
    file.write_bytes(content)
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
    for kept in ({"save": tmp_path / "run", "save_interval": 1}, {"export_hf": tmp_path / "out"}, {}):
        argv = product.command(**{"init_from_hf": folder, "save": None, "train_iters": 2, **shape, **DP2.options, **kept})
        ended = product.launcher.run(argv, 2, environ={"LOCAL_WORLD_SIZE": "2"})  # so that each rank compares half of the files
        assert ended.codes == (1, 1)
        says = f"{file}: got sha256 "
        assert says in complaint(ended) and ended.err.count(says) == 1 and "rank 0: " in ended.err
        assert not list((tmp_path / "run").glob("iter_*")) and not (tmp_path / "out").exists()
    evaluated = product.run("evaluate", "--init-from-hf", folder, "--data-path", product.data, "--seq-length", SEQ_LENGTH)
    assert evaluated.codes == (1,) and says in evaluated.err and "loss" not in evaluated.out


@pytest.mark.long
def test_the_tokenizer_beside_checkpoints_has_checksums(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(straight("one"), tmp_path / "run", symlinks=True)
    folder = run / "tokenizer"
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    export = ["export", "--load", run, "--output", tmp_path / "hf"]
    convert = ["convert", run, tmp_path / "hf", "--to", "hf"]
    generate = ["generate", "--load", run, "--prompt", "a", "--max-new-tokens", "1"]
    for name, commands in (("tokenizer.model", (export, convert)), ("tokenizer.json", (export, convert, generate))):
        good = (folder / name).read_bytes()
        other = good.replace(b"<0x41>", b"<0x42>", 1)
        assert other != good
        for damage, says in ((lambda path, other=other: path.write_bytes(other), f"{name}: got sha256 "), (Path.unlink, f"{name}: got no such file")):
            damage(folder / name)
            for command in commands:
                ended = product.run(*command)
                assert ended.codes == (1,) and says in ended.err and "Traceback" not in ended.err, (name, command, ended)
                assert not (tmp_path / "hf").exists()
            (folder / name).write_bytes(good)
    (folder / "SHA256SUMS").unlink()  # as in an older run
    product.run(*export).ok()


@pytest.mark.long
def test_using_nothing(product: Product, refuse: Refuse, straight: Callable[[str], Path], tmp_path: Path) -> None:
    evaluate, one = ["evaluate", "--data-path", product.data, "--seq-length", SEQ_LENGTH], straight("one")
    for code, says, argv in (
        (2, "--split: got 100,0,0, expected a share of documents for validation", [*evaluate, "--load", one, "--split", "100,0,0"]),
        (1, "--load nowhere: got no such folder, expected iter_* folders, or a model folder", [*evaluate, "--load", "nowhere"]),
        (2, "--load, --init-from-hf: got neither", evaluate),
        (2, "--load, --init-from-hf: got both", ["generate", "--load", "a", "--init-from-hf", "b"]),
        (2, "--output: got nothing", ["export", "--load", one]),
        (1, "nowhere: got no such folder", ["export", "--load", "nowhere", "--output", tmp_path / "hf"]),
    ):
        assert says in refuse(argv, code=code), argv
    assert list(tmp_path.iterdir()) == []
    both = product.launcher.run([*evaluate, "--load", "nowhere"], 2)
    assert both.codes == (1, 1) and both.errs[0].count("error: --load nowhere: ") == 1 and both.errs[1] == "", "rank 0 speaks for all"
