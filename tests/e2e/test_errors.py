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
    CP2,
    DP2,
    EVALUATED,
    INTERLEAVED,
    ONE,
    PP2,
    SEQ_LENGTH,
    TP2,
    ZB_V,
    Layout,
    Product,
    Refuse,
    assert_same_curve,
    contents,
    copy_dataset,
    exact_curve,
    words,
)
from tests.launcher import ROOT, TIMEOUT, Finished

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
        "--tensor-model-parallel-size: got 3, expected a divisor or a multiple of num_key_value_heads 2; choose 2 or 4",
    ),
    "width and heads": (
        1,
        {"num_attention_heads": 3, "num_query_groups": 3},
        "--hidden-size: got 64, expected a multiple of num_attention_heads 3;",
    ),
    "layers and pp": (
        3,
        {"pipeline_model_parallel_size": 3},
        "--pipeline-model-parallel-size: got 3 stages, expected a divisor of num_hidden_layers 4; choose 2 or 4 stages, or give "
        "--pipeline-layer-split",
    ),
    "layers and a V": (
        2,
        {**ZB_V.options, "num_layers": 6},
        "--pipeline-model-parallel-size: got 4 stages, expected a divisor of num_hidden_layers 6; choose 3 or 6 stages",
    ),
    "layers and the head": (
        2,
        {**PP2.options, "account_for_loss_in_pipeline_split": True},
        "--pipeline-model-parallel-size: got 2 stages, expected a divisor of num_hidden_layers 4 + 1 for embedding and loss; choose 1 or 5",
    ),
    "sum of a split": (
        2,
        {**PP2.options, "pipeline_layer_split": (2, 3)},
        "--pipeline-layer-split: got 2 3 (sum 5), expected 2 numbers of 1 or more (one per stage) that add up to num_hidden_layers 4; "
        "change the list",
    ),
    "length of a split": (
        2,
        {**PP2.options, "pipeline_layer_split": (1, 1, 2)},
        "--pipeline-layer-split: got 1 1 2 (sum 4), expected 2 numbers of 1 or more (one per stage) that add up to num_hidden_layers 4;",
    ),
    "nothing in a split": (2, {**PP2.options, "pipeline_layer_split": (0, 4)}, "--pipeline-layer-split: got 0 4 (sum 4), expected 2 "),
    "microbatches of an interleaved schedule": (
        2,
        {**INTERLEAVED.options, "global_batch_size": 6},
        "number of microbatches, global_batch_size / (micro_batch_size x dp): got 3, expected a multiple of "
        "--pipeline-model-parallel-size 2 with --pipeline-schedule interleaved; choose 2 or 4 (change --global-batch-size)",
    ),
    "chunks without interleaving": (
        2,
        {**PP2.options, "virtual_pipeline_model_parallel_size": 2},
        "--virtual-pipeline-model-parallel-size: got 2, expected 1 chunk per rank with --pipeline-schedule 1f1b; leave it out, or choose "
        "--pipeline-schedule interleaved",
    ),
    "interleaving without chunks": (
        2,
        {**PP2.options, "pipeline_schedule": "interleaved"},
        "--virtual-pipeline-model-parallel-size: got 1, expected 2 or more chunks per rank with --pipeline-schedule interleaved; give",
    ),
    "chunks of a V": (
        2,
        {**ZB_V.options, "virtual_pipeline_model_parallel_size": 3},
        "--virtual-pipeline-model-parallel-size: got 3, expected 2 chunks per rank with --pipeline-schedule zb-v; leave it out",
    ),
    "processes": (
        3,
        {"tensor_model_parallel_size": 2},
        "processes: got 3, expected a multiple of tp 2 x cp 1 x pp 1 = 2; start 2 or 4 processes, or change --tensor-model-parallel-size, "
        "--context-parallel-size or --pipeline-model-parallel-size",
    ),
    "batch": (
        2,
        {"global_batch_size": 6},
        "--global-batch-size: got 6, expected a multiple of micro_batch_size 2 x dp 2 = 4; choose 4 or 8",
    ),
    "sequence and tp": (2, {**TP2.options, "seq_length": 33}, "--seq-length: got 33, expected a multiple of tp 2 = 2; choose 32 or 34"),
    "sequence and cp": (2, {**CP2.options, "seq_length": 34}, "--seq-length: got 34, expected a multiple of 2 x cp 2 = 4; choose 32 or 36"),
    "sequence, cp and tp": (
        4,
        {**TP2.options, **CP2.options, "seq_length": 36},
        "--seq-length: got 36, expected a multiple of 2 x cp 2 x tp 2 = 8; choose 32 or 40",
    ),
    "no data": (1, {"data_path": None, "vocab_size": 512}, "--data-path: got nothing, expected PREFIX of PREFIX.bin and PREFIX.idx"),
    "unknown flag": (
        1,
        {"micro_batchsize": 2},
        "--micro-batchsize: got an unknown flag, expected an option of this command; did you mean --micro-batch-size?",
    ),
    "unknown model": (1, {"model": "llama3-8"}, "did you mean llama3-8b?"),
    "two precisions": (1, {"bf16": True, "fp16": True}, "--bf16 --fp16: got 2 precisions, expected at most one; leave the others out"),
    "three precisions": (1, {"bf16": True, "fp16": True, "fp64": True}, "--bf16 --fp16 --fp64: got 3 precisions, expected at most one;"),
    "loss scale": (1, {"fp16": True, "initial_loss_scale": 0}, "--initial-loss-scale: got 0.0, expected a positive number"),
    "loss scales": (
        1,
        {"fp16": True, "initial_loss_scale": 8, "min_loss_scale": 16},
        "--min-loss-scale: got 16.0, expected at most initial_loss_scale 8.0; lower one or raise the other",
    ),
    "hysteresis": (1, {"fp16": True, "hysteresis": 0}, "--hysteresis: got 0, expected a positive number"),
    "window": (1, {"fp16": True, "loss_scale_window": 0}, "--loss-scale-window: got 0, expected a positive number"),
    "cp": (1, {"context_parallel_size": 0}, "--context-parallel-size: got 0, expected a positive number"),
    "recomputing some": (
        1,
        {"recompute_granularity": "full", "recompute_num_layers": "some"},
        "--recompute-num-layers: got some, expected ",
    ),
    "recomputing too many": (1, {"recompute_granularity": "full", "recompute_num_layers": 5}, "--recompute-num-layers: got 5, expected "),
    "unknown schedule": (1, {"pipeline_schedule": "zb-v2"}, "--pipeline-schedule: got zb-v2, expected one of gpipe, 1f1b, interleaved, "),
    "steps": (1, {"train_iters": 0}, "--train-iters: got 0, expected a positive number"),
    "vocabulary": (
        1,
        {"vocab_size": 300},
        "--vocab-size: got 300, expected at least the tokenizer's 512; give --vocab-size 512 or leave it out",
    ),
    "yaml": (1, {"config": "{folder}/bad.yaml"}, "bad.yaml:3: got expected ',' or ']', but got ':', expected valid YAML; mend that line"),
    "no yaml": (1, {"config": "{folder}/none.yaml"}, "none.yaml: got [Errno 2] No such file or directory"),
    "yaml key": (1, {"config": "{folder}/key.yaml"}, "key.yaml:1 learning_rat"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_wrong_configurations_exit_with_2(name: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    processes, changes, says = CONFIGURATIONS[name]
    (tmp_path / "bad.yaml").write_text("lr: 1e-3\nseq_length: [32\nmicro_batch_size: 2\n")
    (tmp_path / "key.yaml").write_text("learning_rat: 1e-3\n")
    changes = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
    with untouched(tmp_path):
        text = refuse(product.command(**{"save": tmp_path / "new", **changes}), code=2, processes=processes)
    assert says in text and text.count(says) == 1, "said once, by rank 0"


@pytest.mark.parametrize("name", ["processes", "yaml"])
def test_so_do_the_processes_of_a_launcher(name: str, product: Product, tmp_path: Path) -> None:
    processes, changes, says = CONFIGURATIONS[name]
    (tmp_path / "bad.yaml").write_text("lr: 1e-3\nseq_length: [32\nmicro_batch_size: 2\n")
    changes = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
    assert launched(product, tmp_path, Layout(processes, {}), code=2, **changes).count(says) == 1


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
    "no tokens": (without_tokens, "docs.bin: got no tokens, expected at least one document with text"),
    "empty bin": (lambda prefix: cut(prefix.with_suffix(".bin"), 0), "docs.bin: got 0 bytes, expected "),
    "short bin": (lambda prefix: cut(prefix.with_suffix(".bin"), 1000), "docs.bin: got 1000 bytes, expected "),
    "empty idx": (lambda prefix: cut(prefix.with_suffix(".idx"), 0), "docs.idx: got "),
    "short idx": (lambda prefix: cut(prefix.with_suffix(".idx"), 1000), "docs.idx: got 1000 bytes, expected "),
    "strange idx": (lambda prefix: prefix.with_suffix(".idx").write_bytes(b"PK\3\4" * 1000), "docs.idx: got the first bytes "),
    "no bin": (lambda prefix: prefix.with_suffix(".bin").unlink(), "docs.bin: got no such file"),
    "strange meta": (lambda prefix: Path(f"{prefix}.meta.json").write_text("[1"), "docs.meta.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_datasets_exit_with_1(name: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    damage, says = DAMAGES[name]
    damage(copied(product, tmp_path / "docs"))
    with untouched(tmp_path):
        assert says in refuse(product.command(save=tmp_path / "new", data_path=tmp_path / "docs"), code=1)


@pytest.mark.parametrize("name", ["no tokens", "short bin", "strange meta"])
def test_damaged_datasets_end_every_rank(name: str, product: Product, tmp_path: Path) -> None:
    damage, says = DAMAGES[name]
    damage(copied(product, tmp_path / "docs"))
    assert says in launched(product, tmp_path, TWO, code=1, data_path=tmp_path / "docs")


def test_no_dataset(product: Product, refuse: Refuse) -> None:
    text = refuse(product.command(data_path=f"{product.data}.bin", vocab_size=512), code=1)
    assert "docs.bin.idx: got no such file, expected PREFIX.bin and PREFIX.idx; give the common prefix" in text


def test_too_little_text_for_validation(product: Product, tmp_path: Path) -> None:
    text = launched(product, tmp_path, TWO, code=1, split="9999,1,0", **EVALUATED)
    assert "tokens in the validation split, expected at least 33 tokens (seq_length + 1)" in text


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
    "no field": (
        '{"text": "one"}\n{"body": "two"}\n',
        1,
        [],
        "docs.jsonl:2: field 'text': got no such field (fields: 'body'), expected a string",
    ),
    "no json": ('{"text": "one"}\n{"text": \n', 1, [], "docs.jsonl:2: got invalid JSON"),
    "an array": (
        '[{"text": "one"},\n {"text": "two"}]\n',
        1,
        [],
        "one JSON object per line; write the array's objects one to a line, as jq -c '.[]' does",
    ),
    "no text": ("\n\n", 1, [], "no text in the whole input, expected text; check the files and --json-keys"),
    "two tokenizers": (
        '{"text": "one"}\n',
        2,
        ["--train-tokenizer"],
        "tokenizer: got both, expected exactly one of tokenizer_model and train_tokenizer",
    ),
}


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
    options = {
        "input": tmp_path / "docs.jsonl",
        "output_prefix": tmp_path / "out",
        "tokenizer_model": f"{product.data}-tokenizer",
        "workers": 2,
    }
    run = product.launcher.start(["preprocess", *words(options)])
    run.until(lambda: any(path.stat().st_size for path in tmp_path.glob("out.bin.tmp-*")))
    run.signal(Signals.SIGINT)
    ended = run.wait()
    assert ended.codes == (130,) and ended.err == "interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocess_refuses(name: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    content, code, more, says = PREPROCESS[name]
    (tmp_path / "docs.jsonl").write_text(content)
    tokenizer = ["--tokenizer-model", f"{product.data}-tokenizer"]
    command = ["preprocess", "--input", tmp_path / "docs.jsonl", "--output-prefix", tmp_path / "out", "--workers", 1, *tokenizer, *more]
    assert says in refuse(command, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


def test_the_checkpoint_of_another_model(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    text = launched(product, tmp_path, TP2, code=1, load=straight("one"), num_layers=2, rotary_base=5000)
    assert "is a checkpoint of another model:" in text
    assert "num_hidden_layers: got 4, expected 2;" in text and "rope_theta: got 10000.0, expected 5000.0;" in text


def test_a_damaged_checkpoint(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(straight("one"), tmp_path / "run")
    (file,) = (tmp_path / "run" / "iter_0000006").glob("*.distcp")
    cut(file, file.stat().st_size // 2)
    text = launched(product, tmp_path, TWO, code=1, save=tmp_path / "run", load=tmp_path / "run", train_iters=8)
    assert f"{file}: got {file.stat().st_size} bytes" in text


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
        "best",
        "events.jsonl",
        "iter_0000003",
        "last",
        "latest_checkpointed_iteration.txt",
        "log.jsonl",
        "tokenizer",
    ]
    product.train(DP2, save=tmp_path, load=tmp_path, **EVALUATED)
    assert exact_curve(tmp_path) == exact_curve(straight("dp2 optim_grads"))


def test_a_save_folder_that_is_a_file(product: Product, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path}/file" in launched(product, tmp_path, TWO, code=1, save=tmp_path / "file")


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
def infinite(product: Product, straight: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HuggingFace folder with one weight that is not finite."""
    folder = tmp_path_factory.mktemp("infinite") / "hf"
    product.run("export", "--load", straight("one"), "--output", folder).ok()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "SHA256SUMS").unlink()
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "names"), [({}, "loss at iteration 1"), (EVALUATED, "validation loss at iteration 0")], ids=["step", "evaluation"]
)
def test_weights_that_are_not_finite(changes: dict[str, Any], names: str, product: Product, infinite: Path, tmp_path: Path) -> None:
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
    ended = product.launcher.run(product.command(init_from_hf=infinite, save=tmp_path, **shape, **changes, **DP2.options), 2)
    assert ended.codes == (1, 1) and f"error: {names}: got nan, expected a finite number; " in complaint(ended)
    assert not list(tmp_path.glob("iter_*"))


def test_one_flipped_bit_of_the_first_weights_ends_every_rank(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The run trains while the files are compared, and waits for that before it keeps anything, at its first save or at its end."""
    folder = tmp_path / "hf"
    product.run("export", "--load", straight("one"), "--output", folder).ok()
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # the last bits of a weight's mantissa: it computes like the others
    file.write_bytes(content)
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
    for kept in ({"save": tmp_path / "run", "save_interval": 1}, {"export_hf": tmp_path / "exported"}, {}):
        argv = product.command(**{"init_from_hf": folder, "save": None, "train_iters": 2, **shape, **DP2.options, **kept})
        ended = product.launcher.run(argv, 2, environ={"LOCAL_WORLD_SIZE": "2"})  # so that each rank compares half of the files
        assert ended.codes == (1, 1)
        says = f"{file}: got sha256 "
        assert says in complaint(ended) and ended.err.count(says) == 1 and "rank 0: " in ended.err
        assert not list((tmp_path / "run").glob("iter_*")) and not (tmp_path / "exported").exists()
    evaluated = product.run("evaluate", "--init-from-hf", folder, "--data-path", product.data, "--seq-length", SEQ_LENGTH)
    assert evaluated.codes == (1,) and says in evaluated.err and "loss" not in evaluated.out


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
def test_evaluating_nothing(product: Product, refuse: Refuse, straight: Callable[[str], Path]) -> None:
    data = ["--data-path", product.data, "--seq-length", SEQ_LENGTH]
    for code, says, argv in (
        (2, "--split: got 100,0,0, expected a share of documents for validation", ["--load", straight("one"), "--split", "100,0,0"]),
        (1, "nowhere: got no such folder, expected a model folder", ["--load", "nowhere"]),
        (2, "--load, --init-from-hf: got neither", []),
    ):
        assert says in refuse(["evaluate", *data, *argv], code=code), argv


@pytest.mark.long
def test_generating_and_exporting_nothing(refuse: Refuse, straight: Callable[[str], Path], tmp_path: Path) -> None:
    for code, says, argv in (
        (2, "--load, --init-from-hf: got neither", ["generate"]),
        (2, "--load, --init-from-hf: got both", ["generate", "--load", "a", "--init-from-hf", "b"]),
        (1, "nowhere: got no such folder", ["generate", "--load", "nowhere"]),
        (2, "--output: got nothing", ["export", "--load", straight("one")]),
        (1, "nowhere: got no such folder", ["export", "--load", "nowhere", "--output", tmp_path / "hf"]),
    ):
        assert says in refuse(argv, code=code), argv
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_can_be_mended(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing that a refused run left behind is in the way of the right one."""
    launched(product, tmp_path, TWO, code=1, split="9999,1,0", **EVALUATED)
    product.train(TP2, save=tmp_path / "new", load=tmp_path / "new", **EVALUATED)
    assert_same_curve(tmp_path / "new", straight("one"))
