"""Models of experts in torch_dist folders: Megatron-Core's own, with its modules on CPUs, are read bit for bit, and it loads and goes on from those
that are written here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_llama as ml
import pytest
import torch
from megatron_llama.converter.torch_dist.optimizer import open_optimizer
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.launch.launcher import Place
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter import mcore
from tests.converter.converting import assert_same, assert_same_model, convert, loaded, refusal
from tests.converter.mcore import Run, megatron, options_of
from tests.converter.test_convert_families import SIZES, saved
from tests.converter.test_going_on import six_steps
from tests.converter.test_torch_dist_optimizer import STATES
from tests.converter.test_torch_dist_optimizer import assert_same as assert_same_state
from tests.converter.test_torch_dist_writer import BATCH, SAVED, SEQ, STEPS, goes_on, options, samples, tokens  # noqa: F401
from tests.e2e.product import state
from tests.harness import Cluster

Capture = pytest.CaptureFixture[str]
SMALL = {**SIZES, "vocab_size": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4},
    "qwen3_moe": {
        **SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 40, "head_dim": 16,
        "mlp_only_layers": [1], "norm_topk_prob": False,
    },
}  # fmt: skip
"""Of the second one layer is dense: each layer has tensors of its own."""
MIXED = [1, 0, 1]
EXPERTS = mcore._expert_settings


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(fields, folder / name) for name, fields in MODELS.items()}


def saves(place: Place, runs: Sequence[Run], samples: list[Tensor], folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """Train on the samples, where that is possible, and save under ``folder/N``. On rank 0 what all ranks hold then."""
    found = []
    for number, run in enumerate(runs):
        with megatron(place, run) as trainer:
            if run.tp == 1:
                trainer.train(samples)
            trainer.save(folder / f"{number}", weights_only=run.tp > 1)
            found.append({what: trainer.tensors(what) for what in (STATES if run.tp == 1 else STATES[:1])})
    return found


@pytest.mark.long
def test_megatrons_folders_are_read(cluster: Cluster, models: dict[str, Path], tmp_path: Path) -> None:
    """One optimizer, and one for experts beside the other; in fp32 and bf16; keys of layers, of experts, of halves; names of local modules; experts
    that tensor ranks share; flat buckets, in one optimizer and in two; pipelines."""
    mixtral, qwen = Run(models["mixtral"], micro_batch_size=1), Run(models["qwen3_moe"], layer_freq=MIXED)
    runs = [
        mixtral,
        replace(mixtral, ep=2, sharding="fully_reshardable", bf16=True),
        replace(qwen, ep=2),
        replace(qwen, sharding="fully_reshardable", own_norm_key=False),
        replace(mixtral, singleton=True, ep=2),
        replace(qwen, sharding="dp_reshardable", ep=2),
        replace(mixtral, sharding="dp_reshardable"),
        replace(qwen, tp=2, etp=2),
    ]
    staged = [replace(mixtral, pp=2, ep=2, sharding=sharding, bf16=True) for sharding in ("dp_reshardable", "fully_reshardable")]
    torch.manual_seed(1)
    samples = list(torch.randint(0, 250, (3, 2, 33)))
    everything = cluster.run(2, saves, runs, samples, tmp_path / "2")[0] + cluster.run(4, saves, staged, samples, tmp_path / "4")[0]
    folders = [*(tmp_path / "2" / f"{number}" for number in range(len(runs))), *(tmp_path / "4" / f"{number}" for number in range(2))]
    for number, (run, folder, states) in enumerate(zip(runs + staged, folders, everything, strict=True)):
        back = convert(folder, tmp_path / f"back {number}", "--to", "hf")
        torch.testing.assert_close(tensors(back), states["weight"], rtol=0, atol=0)
        reader = TorchDistReader(folder, None, 0)
        if run.tp == 1:
            opened = open_optimizer(reader)
            assert (opened.step, opened.iteration) == (3, 3)
            assert_same_state(opened, reader, states)


def saves_legacy(place: Place, run: Run, folder: Path) -> dict[str, Tensor]:
    """Save a model of GroupedMLP, which computes on GPUs alone. Returns its experts' weights."""
    kinds = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
    with ExitStack() as section:
        from megatron.core.transformer.moe import grouped_gemm_util

        section.enter_context(mock.patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available", lambda: None))
        section.enter_context(mock.patch.object(mcore, "_expert_settings", lambda run, hf: {**EXPERTS(run, hf), **kinds}))
        section.enter_context(mock.patch.object(mcore.Trainer, "fill"))
        trainer = section.enter_context(megatron(place, run))
        trainer.save(folder, weights_only=True)
        return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters() if "experts" in name}


@pytest.mark.long
def test_the_legacy_grouped_module(cluster: Cluster, models: dict[str, Path], tmp_path: Path) -> None:
    """It has the matrices of all its experts side by side, transposed."""
    ranks = cluster.run(2, saves_legacy, Run(models["mixtral"], ep=2), tmp_path / "run")
    found = tensors(convert(tmp_path / "run", tmp_path / "back", "--to", "hf"))
    for layer, expert in product(range(2), range(4)):
        stacked = {name.rpartition(".")[2]: tensor for name, tensor in ranks[expert // 2].items() if f".layers.{layer}." in name}
        gate_up = stacked["weight1"].view(2, 64, -1)[expert % 2].t()
        of_expert = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
        expected = {"w1": gate_up[:96], "w3": gate_up[96:], "w2": stacked["weight2"].view(2, -1, 64)[expert % 2].t()}
        for name, tensor in expected.items():
            assert torch.equal(found[f"{of_expert}{name}.weight"], tensor)


def loads(place: Place, runs: Sequence[Run], folders: Sequence[Path], ids: Tensor) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Weights, on rank 0, and logits of models that had other weights before."""
    found = []
    for run, folder in zip(runs, folders, strict=True):
        with megatron(place, run) as trainer:
            trainer.fill({name: torch.randn(tensor.shape) for name, tensor in tensors(run.model).items()})
            trainer.load(folder)
            trainer.model.eval()
            logits = trainer.logits(ids)
            assert logits is not None
            found.append((trainer.tensors("weight"), logits))
    return found


@pytest.mark.long
def test_megatron_loads_the_weights(cluster: Cluster, models: dict[str, Path], tmp_path: Path) -> None:
    """Whole experts, experts that ranks divide among them or share, and transformers' logits; and the way back."""
    layouts: list[dict[str, Any]] = [{"ep": 2}, {"tp": 2}, {"tp": 2, "etp": 2}]
    written = {name: convert(source, tmp_path / name, "--to", "torch_dist") for name, source in models.items()}
    runs = [Run(models["mixtral"], **layout) for layout in layouts]
    runs += [Run(models["qwen3_moe"], layer_freq=MIXED, **layout) for layout in layouts]
    ids = torch.arange(64).view(2, 32) * 5 % 251
    found = cluster.run(2, loads, runs, [written[run.model.name] for run in runs], ids)[0]
    for run, (weights, logits) in zip(runs, found, strict=True):
        torch.testing.assert_close(weights, tensors(run.model), rtol=0, atol=0)
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(run.model)(ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for name, source in models.items():
        back = convert(written[name], tmp_path / f"{name} native", "--to", "native")
        assert_same(convert(back, tmp_path / f"{name} back", "--to", "hf"), source)


@pytest.mark.long
def test_megatron_goes_on(
    cluster: Cluster, tokens: tuple[str, Tensor], models: dict[str, Path], tmp_path: Path, capsys: Capture  # noqa: F811
) -> None:
    """Three steps here, three more in Megatron-Core, with one optimizer and with one for experts: in bf16 the masters are not the weights."""
    data, text = tokens
    sizes = {"train_iters": STEPS, "warmup_iters": 2, "global_batch_size": BATCH, "seq_length": SEQ, "sharding": "fully_reshardable"}
    runs, folders, expected = [], [], []
    for name, bf16, ep in (("mixtral", False, 1), ("qwen3_moe", True, 2)):
        layer_freq: Any = 1 if name == "mixtral" else MIXED
        run = Run(models[name], bf16=bf16, ep=ep, layer_freq=layer_freq, **sizes)
        save = tmp_path / f"{len(runs)}"
        done = ml.train(options(run, data, save=str(save), save_interval=SAVED, bf16=bf16))
        words = ("--expert-model-parallel-size", f"{ep}") if ep > 1 else ()
        capsys.readouterr()
        folders.append(convert(save / f"iter_{SAVED:07d}", tmp_path / f"{len(runs)} out", "--to", "torch_dist", *words))
        assert ("written for a run without expert parallelism" in capsys.readouterr().out) == (ep == 1)
        runs.append(run)
        expected.append((state(save / f"iter_{SAVED:07d}"), [done.losses[step] for step in range(SAVED + 1, STEPS + 1)]))
    found = cluster.run(2, goes_on, runs, folders, samples(text)[SAVED:])[0]
    for run, (held, iteration, losses), (ours, wanted) in zip(runs, found, expected, strict=True):
        masters = {name: tensor for name, tensor in ours.items() if not name.startswith("optimizer.")}
        torch.testing.assert_close(held["master"], masters, rtol=0, atol=0)
        for what in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(held[what], {name: ours[f"optimizer.{what}.{name}"] for name in masters}, rtol=0, atol=0)
        assert iteration == SAVED
        torch.testing.assert_close(losses, wanted, rtol=5e-3 if run.bf16 else 1e-6, atol=0)


@pytest.mark.long
def test_a_run_of_megatrons_goes_on(cluster: Cluster, tokens: tuple[str, Tensor], models: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    """Three steps there, with experts that two ranks divide, three more here."""
    data, text = tokens
    run = Run(models["qwen3_moe"], ep=2, layer_freq=MIXED, train_iters=STEPS, global_batch_size=BATCH, sharding="fully_reshardable")
    [losses] = cluster.run(2, six_steps, [run], samples(text), tmp_path / "runs")[0]
    found = ml.train(options_of(run, data, load=str(tmp_path / "runs" / "0"), data_order="sequential"))
    torch.testing.assert_close([*found.losses.values()], losses[SAVED:], rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def written(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models as torch_dist, without sums of their files: the tests change arguments."""
    found = {}
    for name, source in models.items():
        found[name] = convert(source, tmp_path_factory.mktemp("written") / name, "--to", "torch_dist") / "release"
        (found[name] / "integrity.json").unlink()
        (found[name].parent / "SHA256SUMS").unlink()
    return found


@contextmanager
def changed(folder: Path, *, alone: bool = False, **args: Any) -> Iterator[None]:
    """Other arguments in a folder; ``alone``: without our extra one, as Megatron-LM saves them."""
    content = (folder / "common.pt").read_bytes()
    others = loaded(folder / "common.pt")
    given = {**vars(others["args"]), **args}
    if alone:
        del given["hf_config"]
    torch.save({**others, "args": argparse.Namespace(**given)}, folder / "common.pt")
    try:
        yield
    finally:
        (folder / "common.pt").write_bytes(content)


@pytest.mark.parametrize("name", MODELS)
def test_the_arguments_of_megatron_lm_are_enough(name: str, models: dict[str, Path], written: dict[str, Path], tmp_path: Path) -> None:
    """A negative factor is none to Megatron, which also takes the width of dense layers for one that is not given."""
    width = {"moe_ffn_hidden_size": None} if name == "mixtral" else {"moe_token_dispatcher_type": "alltoall"}
    with changed(written[name], alone=True, moe_expert_capacity_factor=-1.0, moe_router_load_balancing_type="aux_loss", **width):
        back = convert(written[name], tmp_path / "back", "--to", "hf", "--vocab-size", "256")
    assert_same_model(back, models[name], but=("bos_token_id", "eos_token_id", "pad_token_id"))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "load_balancing_type: got 'sinkhorn', expected none or aux_loss or seq_aux_loss"),
    ("mixtral", {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "load_balancing_type: got ['aux_loss', 'sinkhorn'], expected none"),
    ("mixtral", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function: got 'sigmoid', expected softmax"),
    ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax: got True, expected False, by the config of a mixtral"),
    ("qwen3_moe", {"moe_router_pre_softmax": False}, "moe_router_pre_softmax: got False, expected True, by the config of a qwen3_moe"),
    ("mixtral", {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor: got 2.5, expected None"),
    ("mixtral", {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_group_topk: got 1, expected None"),
    ("mixtral", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias: got True, expected False"),
    ("mixtral", {"moe_expert_capacity_factor": 1.25}, "moe_expert_capacity_factor: got 1.25, expected None: no token is dropped"),
    ("mixtral", {"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps: got 0.01, expected None"),
    ("mixtral", {"moe_shared_expert_intermediate_size": 96}, "moe_shared_expert_intermediate_size: got 96, expected None"),
    ("mixtral", {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size: got 32, expected None"),
    ("mixtral", {"moe_novel": 3}, "moe_novel: got 3, expected an argument that is known here; name it if the model computes the same"),
    ("mixtral", {"num_experts": None}, "num_experts: got None, expected 4, by the config of a mixtral"),
    ("mixtral", {"num_experts": 8}, "num_experts: got 8, expected 4, by the config of a mixtral"),
    ("mixtral", {"moe_router_topk": 1}, "moe_router_topk: got 1, expected 2, by the config of a mixtral"),
    ("mixtral", {"moe_ffn_hidden_size": 100}, "moe_ffn_hidden_size: got 100, expected 96, by the config of a mixtral"),
    ("mixtral", {"moe_layer_freq": 2}, "moe_layer_freq: got 2, expected [1, 1], by the config of a mixtral"),
    ("mixtral", {"moe_layer_freq": [1]}, "moe_layer_freq: got [1], expected an array of 2 integers"),
    ("qwen3_moe", {"moe_layer_freq": [1, 2, 1]}, "moe_layer_freq: got [1, 2, 1], expected a 0 or a 1 for each layer"),
    ("mixtral", {"moe_router_topk": "2"}, "moe_router_topk: got '2', expected an integer"),
    ("mixtral", {"alone": True, "num_experts": 8}, "decoder.layers.mlp.router.weight: got shape (2, 4, 64), expected (2, 8, 64)"),
    ("mixtral", {"alone": True, "moe_ffn_hidden_size": 64}, "experts.linear_fc2.weight: got shape (2, 4, 64, 96), expected (2, 4, 64, 64)"),
    ("mixtral", {"alone": True, "moe_layer_freq": [1, 0]}, "moe_layer_freq: got [1, 0], expected [1, 1], by the config of a mixtral"),
    ("mixtral", {"alone": True, "moe_router_topk": None}, "moe_router_topk: got nothing, expected a value"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "says"), REFUSED, ids=[f"{name}: {says.partition(', expected')[0]}" for name, _, says in REFUSED])
def test_what_changes_the_computation_is_refused_by_name(
    name: str, args: dict[str, Any], says: str, written: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    with changed(written[name], **args):
        assert says in refusal(capsys, written[name], tmp_path / "out", "--to", "hf", "--vocab-size", "256")


def test_an_argument_that_the_user_knows_is_ignored(models: dict[str, Path], written: dict[str, Path], tmp_path: Path) -> None:
    with changed(written["mixtral"], moe_novel=3):
        back = convert(written["mixtral"], tmp_path / "back", "--to", "hf", "--ignore-hf-config-fields", "moe_novel")
    assert_same_model(back, models["mixtral"])


@pytest.mark.tries("expert_model_parallel_size")
def test_experts_that_cannot_be_divided_are_refused(models: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    """And a router whose weights are all 1, of which Megatron-LM makes an error."""
    words = ("--to", "torch_dist", "--expert-model-parallel-size")
    said = refusal(capsys, models["mixtral"], tmp_path / "out", *words, "3", status=2)
    assert "--expert-model-parallel-size: got 3, expected a divisor of num_experts 4" in said
    dense = saved({**SIZES, "model_type": "llama"}, tmp_path / "dense")
    assert "got 2, expected 1 for a model without experts" in refusal(capsys, dense, tmp_path / "out", *words, "2", status=2)
    said = refusal(capsys, dense, tmp_path / "out", "--to", "hf", *words[2:], "2", status=2)
    assert "--expert-model-parallel-size: got 2, expected --to torch_dist" in said
    first = saved({**MODELS["mixtral"], "num_experts_per_tok": 1}, tmp_path / "first")
    assert "num_experts_per_tok: got 1 with norm_topk_prob" in refusal(capsys, first, tmp_path / "out", "--to", "torch_dist", status=2)
