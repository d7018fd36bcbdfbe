"""torch_dist folders that are written here: Megatron-Core itself loads them, in every layout, and goes on from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron_llama as ml
import numpy as np
import pytest
import torch
from megatron_llama.data.indexed import IndexedDatasetWriter
from megatron_llama.launch.launcher import Place
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.checkpoint.cases import full_disk
from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import convert, hf_folder, loaded, refusal
from tests.converter.mcore import Run, megatron, options_of
from tests.e2e.product import assert_same_state, state
from tests.harness import Cluster

VOCAB, SEQ, BATCH, STEPS, SAVED = 256, 32, 4, 6, 3
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Of four ranks; the others are data-parallel."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def model_of(place: Place, runs: Sequence[Run], folder: Path, ids: Tensor) -> list[tuple[dict[str, Tensor], Tensor | None]]:
    """Weights, on rank 0, and logits, on the last stage, of models that had other weights before."""
    found = []
    for run in runs:
        with megatron(place, run) as trainer:
            trainer.fill({name: torch.randn(tensor.shape) for name, tensor in tensors(run.model).items()})
            trainer.load(folder)
            found.append((trainer.tensors("weight"), trainer.logits(ids)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("tied", "bf16", "layouts"), [(False, False, LAYOUTS[1:3]), (True, True, LAYOUTS[3:])], ids=["untied fp32", "tied bf16"]
)
def test_megatron_loads_the_weights(cluster: Cluster, tmp_path: Path, tied: bool, bf16: bool, layouts: Sequence[tuple[int, int]]) -> None:
    """A vocabulary of 300 is padded for tp 1, and by Megatron for each layout."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    source = hf_folder(tmp_path / "hf", dtype, tie_word_embeddings=tied)
    folder = convert(source, tmp_path / "out", "--to", "torch_dist")
    runs = [Run(source, tp, pp, bf16=bf16, global_batch_size=4) for tp, pp in layouts]
    ids = torch.arange(64).view(2, 32) * 5 % 251
    ranks = cluster.run(4, model_of, runs, folder, ids)
    expected = tensors(source)
    reference = LlamaForCausalLM.from_pretrained(source, dtype=dtype)(ids).logits.float()
    for first, last in zip(ranks[0], ranks[-1], strict=True):
        torch.testing.assert_close(first[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(last[1], reference, rtol=0, atol=0.1 if bf16 else 1e-4)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensor]:
    """A dataset of one document, and its tokens."""
    found = np.random.default_rng(1).integers(0, 250, STEPS * BATCH * SEQ + 1, np.uint16)
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(found)
    return str(prefix), torch.from_numpy(found.astype(np.int64))


def samples(tokens: Tensor) -> list[Tensor]:
    """What the steps read one after the other, [batch, sequence + 1]."""
    return list(tokens.unfold(0, SEQ + 1, SEQ).view(STEPS, BATCH, SEQ + 1))


def options(run: Run, data: str, **others: Any) -> dict[str, Any]:
    """The run as it is started here."""
    start = {"init_from_hf": str(run.model), "data_order": "sequential", "lr_warmup_iters": run.warmup_iters}
    return options_of(run, data, **{**start, "global_batch_size": BATCH, **others})


def goes_on(place: Place, runs: Sequence[Run], folders: Sequence[Path], later: list[Tensor]) -> list[tuple[Any, ...]]:
    """What is loaded, on rank 0, the iteration, and the losses of the steps that follow."""
    found = []
    for run, folder in zip(runs, folders, strict=True):
        with megatron(place, run) as trainer:
            trainer.load(folder)
            held = {what: trainer.tensors(what) for what in ("weight", "master", *MOMENTS)}
            found.append((held, trainer.iteration, trainer.train(later)))
    return found


@pytest.mark.long
def test_megatron_goes_on(cluster: Cluster, tokens: tuple[str, Tensor], tmp_path: Path) -> None:
    """Three steps here, three more in Megatron-Core: in every layout what we hold, and the losses of our own steps. In bf16 the masters are
    not the weights."""
    data, text = tokens
    sizes = {"train_iters": STEPS, "warmup_iters": 2, "global_batch_size": BATCH, "seq_length": SEQ, "sharding": "fully_reshardable"}
    runs, folders, expected = [], [], []
    for bf16, tied, layouts in ((False, False, LAYOUTS), (True, True, LAYOUTS[3:])):
        source = hf_folder(tmp_path / f"hf-{bf16}", torch.float32, vocab_size=VOCAB, tie_word_embeddings=tied)
        of_kind = [Run(source, tp, pp, bf16=bf16, **sizes) for tp, pp in layouts]
        save = tmp_path / f"run-{bf16}"
        done = ml.train(options(of_kind[0], data, save=str(save), save_interval=SAVED, bf16=bf16))
        folder = convert(save / f"iter_{SAVED:07d}", tmp_path / f"out-{bf16}", "--to", "torch_dist")
        runs += of_kind
        folders += [folder] * len(layouts)
        expected += [(state(save / f"iter_{SAVED:07d}"), [done.losses[step] for step in range(SAVED + 1, STEPS + 1)])] * len(layouts)
    found = cluster.run(4, goes_on, runs, folders, samples(text)[SAVED:])[0]
    for run, (held, iteration, losses), (ours, wanted) in zip(runs, found, expected, strict=True):
        masters = {name: tensor for name, tensor in ours.items() if not name.startswith("optimizer.")}
        torch.testing.assert_close(held["master"], masters, rtol=0, atol=0)
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        torch.testing.assert_close(held["weight"], {name: tensor.to(dtype) for name, tensor in masters.items()}, rtol=0, atol=0)
        for what in MOMENTS:
            torch.testing.assert_close(held[what], {name: ours[f"optimizer.{what}.{name}"] for name in masters}, rtol=0, atol=0)
        assert iteration == SAVED
        torch.testing.assert_close(losses, wanted, rtol=2e-3 if run.bf16 else 1e-6, atol=0)


def test_the_common_part_is_the_runs(tokens: tuple[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments and counts by Megatron-LM's names, without a class of its own, and the same again on the way back."""
    run = Run(hf_folder(tmp_path / "hf", vocab_size=VOCAB), train_iters=STEPS, warmup_iters=2)
    save = tmp_path / "run"
    ml.train(options(run, tokens[0], save=str(save), save_interval=SAVED, exit_interval=SAVED))
    capsys.readouterr()
    folder = convert(save, tmp_path / "out", "--to", "torch_dist", "--tensor-model-parallel-size", "4")
    assert "optimizer" not in capsys.readouterr().out
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == f"{SAVED}"
    content = torch.load(folder / f"iter_{SAVED:07d}" / "common.pt", weights_only=False)
    args = vars(content["args"])
    assert (content["iteration"], content["checkpoint_version"]) == (SAVED, 3.0)
    assert (args["consumed_train_samples"], args["train_iters"], args["lr_warmup_iters"]) == (SAVED * BATCH, STEPS, 2)
    assert (args["padded_vocab_size"], args["vocab_size"], args["lr"]) == (512, VOCAB, run.lr)
    matrices, vectors = content["optimizer"]["optimizer"]["param_groups"]
    assert (matrices["weight_decay"], vectors["weight_decay"], matrices["step"]) == (run.weight_decay, 0.0, SAVED)
    decayed = 0.5 * (1 + np.cos(np.pi * (SAVED - 2) / (STEPS - 2)))
    assert matrices["lr"] == pytest.approx(run.min_lr + decayed * (run.lr - run.min_lr), rel=1e-12)
    assert content["opt_param_scheduler"]["num_steps"] == SAVED * BATCH


@pytest.mark.long
def test_the_state_comes_back(tokens: tuple[str, Tensor], tmp_path: Path) -> None:
    """native -> torch_dist -> torch_dist for another padding -> native: masters, moments, position, options."""
    run = Run(hf_folder(tmp_path / "hf", vocab_size=250), train_iters=STEPS, warmup_iters=2)
    save = tmp_path / "run"
    ml.train(options(run, tokens[0], save=str(save), save_interval=SAVED, exit_interval=SAVED, clip_grad=0.5, bf16=True))
    at = convert(save, tmp_path / "1", "--to", "torch_dist")
    at = convert(at, tmp_path / "2", "--to", "torch_dist", "--tensor-model-parallel-size", "4")
    back = convert(at, tmp_path / "3", "--to", "native") / f"iter_{SAVED:07d}"
    assert_same_state(back, save / f"iter_{SAVED:07d}")
    ours, theirs = (json.loads((folder / "meta.json").read_text()) for folder in (save / back.name, back))
    for name in ("iteration", "consumed_samples", "optimizer_step", "model"):
        assert ours[name] == theirs[name]
    for name in ("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay", "adam_beta2", "clip_grad"):
        assert ours["config"]["optimizer"][name] == theirs["config"]["optimizer"][name]
    for name in ("seq_length", "global_batch_size", "train_iters", "seed", "bf16"):
        assert ours["config"]["training"][name] == theirs["config"]["training"][name]


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "said"),
    [({"freeze": ("model.embed_tokens.*",)}, "frozen weights have none"), ({"lora_rank": 2}, "low-rank adapters")],
    ids=["frozen", "adapters"],
)
def test_a_state_that_megatron_has_no_optimizer_for_is_left_out(
    tokens: tuple[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    run = Run(hf_folder(tmp_path / "hf", vocab_size=VOCAB), train_iters=1)
    ml.train(options(run, tokens[0], save=str(tmp_path / "run"), **changes))
    capsys.readouterr()
    folder = convert(tmp_path / "run", tmp_path / "out", "--to", "torch_dist")
    assert said in capsys.readouterr().out
    assert "optimizer" not in loaded(folder / "release" / "common.pt")


def test_what_megatron_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf", attention_bias=True)
    said = refusal(capsys, source, tmp_path / "out", "--to", "torch_dist", status=2)
    assert "megatron attention_bias: got True with mlp_bias False" in said


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf")
    with full_disk(100_000):
        said = refusal(capsys, source, tmp_path / "out", "--to", "torch_dist")
    assert "__0_0.distcp" in said or "__1_0.distcp" in said


def test_values_beyond_the_dtype_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf")
    file = next(source.glob("*.safetensors"))
    save_file({name: tensor * 1e7 for name, tensor in load_file(file).items()}, file)
    said = refusal(capsys, source, tmp_path / "out", "--to", "torch_dist", "--dtype", "float16")
    assert "values beyond torch.float16" in said


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those of two models."""
    folder = tmp_path_factory.mktemp("conversions")
    sources = [hf_folder(folder / f"hf{theta}", rope_theta=theta) for theta in (10_000.0, 20_000.0)]
    return [convert(source, folder / f"out{source.name}", "--to", "torch_dist") for source in sources]


@pytest.mark.long
@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata"])
def test_the_small_files_are_compared_with_their_sums(
    conversions: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A file of another conversion: whole, and of another model."""
    copied, other = shutil.copytree(conversions[0], tmp_path / "out"), conversions[1]
    folder = copied / "release"
    content = (other / "release" / name).read_bytes()
    (folder / name).write_bytes(content + b" " if content == (folder / name).read_bytes() else content)
    said = refusal(capsys, folder, tmp_path / "back", "--to", "hf")
    assert f"{folder}/{name}: got " in said and "by integrity.json; copy the folder again" in said
    (folder / "integrity.json").unlink()
    assert f"{folder}/{name}: got " in refusal(capsys, folder, tmp_path / "back", "--to", "hf"), "SHA256SUMS in the folder above"
    (folder.parent / "SHA256SUMS").unlink()
    convert(folder, tmp_path / "back", "--to", "hf")
