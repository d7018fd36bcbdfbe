"""The distributed optimizer's flat buckets, written here by the rules of Megatron-Core's buffers: TransformerEngine's order of parameters, which
runs on GPUs alone, virtual stages, and buckets that are not what they should be. tests/converter/test_torch_dist_optimizer.py has Megatron's own."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.converter.torch_dist.flat_buckets import FlatBuckets
from megatron_llama.converter.torch_dist.names import StoredSource
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.errors import CheckpointError
from megatron_llama.model.plan.params import hf_shapes
from torch import Tensor

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import config, convert, hf_folder
from tests.converter.distcp import Cuts, write_folder
from tests.converter.test_convert_families import SIZES
from tests.converter.test_convert_families import saved as saved_model
from tests.converter.torch_dist import BACKEND, COLUMN, ROW, arguments, cuts, model_tensors, write_common
from tests.torch_twin import drawn

LOCAL = ("input_layernorm", "linear_proj", "linear_qkv.weight", "pre_mlp_layernorm", "linear_fc1.weight", "linear_fc2")
TRANSFORMER_ENGINE = (
    "linear_proj", "linear_qkv.layer_norm", "linear_qkv.weight", "linear_fc1.layer_norm", "linear_fc1.weight", "linear_fc2",
)
NEITHER = ("linear_qkv.layer_norm", "linear_qkv.weight", "linear_proj", "linear_fc1.layer_norm", "linear_fc1.weight", "linear_fc2")
STATES = {"param": 1.0, "exp_avg": -3.0, "exp_avg_sq": 0.5}
"""The optimizer's tensors are the weights times these."""


def share(name: str, tensor: Tensor, tp: int, rank: int) -> Tensor:
    """What a tensor rank has of a tensor: rows, columns, or all; of the gate and of the up projection each its rows."""
    if name.endswith(ROW):
        return tensor.chunk(tp, dim=1)[rank]
    if "linear_fc1.weight" in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp)[rank] if name.endswith((*COLUMN, "word_embeddings.weight", "output_layer.weight")) else tensor


def buffer(parameters: Sequence[Tensor], dp: int, bucket_size: int) -> list[tuple[Tensor, list[int]]]:
    """The buckets of one model chunk, each with the sizes of its pieces: the last parameter first, each at a multiple of 64, a bucket behind
    the parameter that makes it large enough, and every data rank with its share of the padded bucket."""
    found = []
    at, spans = 0, list[tuple[int, Tensor]]()
    for number, parameter in enumerate(reversed(parameters)):
        at = -(-at // 64) * 64
        spans.append((at, parameter.flatten()))
        at += parameter.numel()
        if at >= bucket_size or number == len(parameters) - 1:
            values = torch.full((at,), 77.0)
            padded = -(-at // (128 * dp)) * 128 * dp
            edges = {0, at, *(rank * padded // dp for rank in range(dp) if rank * padded // dp < at)}
            for start, flat in spans:
                values[start : start + len(flat)] = flat
                edges |= {start, start + len(flat)}
            ordered = sorted(edges)
            found.append((values, [stop - start for start, stop in itertools.pairwise(ordered)]))
            at, spans = 0, []
    return found


def written(
    folder: Path,
    model: Mapping[str, Tensor],
    args: argparse.Namespace,
    order: Sequence[str],
    *,
    stages: Sequence[Sequence[Sequence[int]]],
    bucket_size: int = 10**9,
    spoilt: str = "",
) -> TorchDistReader:
    """Write a model and its buckets: ``stages[pp rank][chunk]`` are layers. ``spoilt`` is a part of the name of a tensor whose masters are
    others."""
    tp, dp = args.tensor_model_parallel_size, 2
    saved: dict[str, tuple[Tensor, Sequence[Sequence[int]]]] = {name: (tensor, cuts(name, tensor, tp)) for name, tensor in model.items()}
    for pp_rank, chunks in enumerate(stages):
        for chunk, layers in enumerate(chunks):
            names: list[tuple[str, int | None]] = [("embedding.word_embeddings.weight", None)] * (pp_rank == chunk == 0)
            names += [
                (name, layer) for layer in layers for part in order for name in model if name.startswith("decoder.layers.") and part in name
            ]
            if pp_rank == len(stages) - 1 and chunk == len(chunks) - 1:
                names += [("decoder.final_layernorm.weight", None), ("output_layer.weight", None)]
            for tp_rank in range(tp):
                parts = [share(name, model[name] if layer is None else model[name][layer], tp, tp_rank) for name, layer in names]
                masters = [part + (spoilt != "" and spoilt in name) for part, (name, _) in zip(parts, names, strict=True)]
                for state, factor in STATES.items():
                    for number, (values, pieces) in enumerate(buffer([factor * master for master in masters], dp, bucket_size)):
                        group = f"optimizer.distributed.dp_group_idx_{pp_rank * tp + tp_rank}.gbuf_idx_{chunk}"
                        saved[f"{group}.dtype_(torch.float32, torch.float32).bucket_idx_{number}.{state}"] = (values, [pieces])
    return opened(folder, saved, args)


def opened(folder: Path, saved: Cuts, args: argparse.Namespace) -> TorchDistReader:
    write_folder(folder, saved)
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
    write_common(folder, args)
    return TorchDistReader(folder, None, 250)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("model") / "hf", vocab_size=250, hidden_size=48)  # norms are no multiple of 64


def model_of(hf: Path, tp: int, *, local: bool = False, keys: str = "stacked") -> tuple[dict[str, Tensor], argparse.Namespace]:
    args = arguments(config(hf), tp=tp)
    return model_tensors(tensors(hf), args, local=local, keys=keys), args


def assert_read(reader: TorchDistReader, hf: Path) -> None:
    """Every state of every tensor, bit for bit."""
    flat, expected = FlatBuckets(reader), tensors(hf)
    for state, factor in STATES.items():
        source = StoredSource(flat, reader.weights, f"{state}.")
        for name, shape in hf_shapes(reader.model).items():
            assert torch.equal(drawn(source, name, shape), factor * expected[name]), f"{state} {name}"


@pytest.mark.few(4)
@pytest.mark.parametrize("bucket_size", [10**9, 9000])
@pytest.mark.parametrize("stages", [[[[0, 1, 2, 3]]], [[[0], [2]], [[1], [3]]], [[[0]], [[1, 2, 3]]], [[[]], [[0, 1, 2, 3]]]], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_transformer_engines_order(tp: int, stages: list[list[list[int]]], bucket_size: int, hf: Path, tmp_path: Path) -> None:
    """Its linear layers hold the norm before them. Virtual stages, and stages with unequal or no layers."""
    model, args = model_of(hf, tp)
    assert_read(written(tmp_path / "iter", model, args, TRANSFORMER_ENGINE, stages=stages, bucket_size=bucket_size), hf)


def test_local_names(hf: Path, tmp_path: Path) -> None:
    """Norms under keys of their own, in the order of local modules."""
    model, args = model_of(hf, 2, local=True)
    assert_read(written(tmp_path / "iter", model, args, LOCAL, stages=[[[0, 1]], [[2, 3]]]), hf)


def test_long_tensors_are_read_by_blocks_of_rows(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_llama.converter.torch_dist.flat_buckets.BLOCK_ELEMENTS", 100)
    model, args = model_of(hf, 2)
    assert_read(written(tmp_path / "iter", model, args, TRANSFORMER_ENGINE, stages=[[[0, 1]], [[2, 3]]]), hf)


def grouped(folder: Path, hf: Path, *, etp: int, experts: Sequence[int]) -> TorchDistReader:
    """Write a model of four experts with the buckets of tp 2 and ep 2, as TransformerEngine's grouped modules have them: of a layer's own experts
    the first matrices before the second ones. ``experts`` is their order."""
    run = TorchDistFolder(convert(hf, folder / "run", "--to", "torch_dist", "--make-vocab-size-divisible-by", "1"))
    model = {}
    for name, stored in run.container.tensors.items():
        run.container.read(name, [0] * len(stored.shape), model.setdefault(name, torch.empty(stored.shape)))
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": etp}
    found: dict[str, tuple[Tensor, Sequence[Sequence[int]]]] = {name: (tensor, cuts(name, tensor, 1)) for name, tensor in model.items()}

    def add(optimizer: int, rank: int, parts: Sequence[Tensor]) -> None:
        for state, factor in STATES.items():
            for number, (values, pieces) in enumerate(buffer([factor * part for part in parts], 2, 9000)):
                group = f"chained_{optimizer}.optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0"
                found[f"{group}.dtype_(torch.float32, torch.float32).bucket_idx_{number}.{state}"] = (values, [pieces])

    of_layer = (*TRANSFORMER_ENGINE[:3], "pre_mlp_layernorm", "mlp.router")
    for tp_rank in range(2):
        parts = [share("word_embeddings.weight", model["embedding.word_embeddings.weight"], 2, tp_rank)]
        for layer, part in itertools.product(range(2), of_layer):
            parts += [share(name, model[name][layer], 2, tp_rank) for name in model if name.startswith("decoder.layers.") and part in name]
        parts += [model["decoder.final_layernorm.weight"], share("output_layer.weight", model["output_layer.weight"], 2, tp_rank)]
        add(0, tp_rank, parts)
    for ep_rank, etp_rank in itertools.product(range(2), range(etp)):
        parts = []
        for layer, module in itertools.product(range(2), ("linear_fc1.weight", "linear_fc2.weight")):
            stacked = model[f"decoder.layers.mlp.experts.experts.{module}"][layer]
            parts += [share(module, stacked[expert], etp, etp_rank) for expert in experts[2 * ep_rank : 2 * ep_rank + 2]]
        add(1, etp_rank + etp * ep_rank, parts)
    return opened(folder / "iter", found, argparse.Namespace(**{**run.args, **sizes}))


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_of_grouped_modules(etp: int, tmp_path: Path) -> None:
    """Tensor ranks have copies of experts, or share them. Experts in another order are not taken for these."""
    fields = {**SIZES, "vocab_size": 250, "num_hidden_layers": 2, "num_local_experts": 4, "tie_word_embeddings": False}
    hf = saved_model({**fields, "model_type": "mixtral"}, tmp_path / "hf")
    assert_read(grouped(tmp_path / "right", hf, etp=etp, experts=[0, 1, 2, 3]), hf)
    message = refused(grouped(tmp_path / "wrong", hf, etp=etp, experts=[0, 2, 1, 3]))
    assert "linear_fc1.weight of layer 0, expert 1: got other values than those of" in message


def refused(reader: TorchDistReader) -> str:
    with pytest.raises(CheckpointError, match="save it with --dist-ckpt-optim-fully-reshardable") as error:
        FlatBuckets(reader)
    return str(error.value)


def test_another_order_is_refused(hf: Path, tmp_path: Path) -> None:
    """The sizes fit in sum, the boundaries do not."""
    model, args = model_of(hf, 1)
    message = refused(written(tmp_path / "iter", model, args, NEITHER, stages=[[[0, 1, 2, 3]]]))
    assert "got buckets that do not fit the order of the model's parameters" in message


def test_masters_of_another_model_are_refused(hf: Path, tmp_path: Path) -> None:
    model, args = model_of(hf, 1)
    message = refused(written(tmp_path / "iter", model, args, TRANSFORMER_ENGINE, stages=[[[0, 1, 2, 3]]], spoilt="linear_fc1.layer_norm"))
    assert "got other values than those of decoder.layers.mlp.linear_fc1.layer_norm_weight, expected the fp32 masters" in message


def test_layers_that_are_not_all_there_are_refused(hf: Path, tmp_path: Path) -> None:
    model, args = model_of(hf, 1)
    assert "do not fit" in refused(written(tmp_path / "iter", model, args, TRANSFORMER_ENGINE, stages=[[[0, 1, 2]]]))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("gbuf_idx_0", "gbuf_idx_1", "got buffers 0.1, expected 2 for each of tp 1 x pp ranks"),
        ("bucket_idx_0", "bucket_idx_1", r"got buckets [1], expected all from 0 on"),
        (".exp_avg_sq", ".momentum_buffer", "got state momentum_buffer, expected that of Adam: param, exp_avg, exp_avg_sq"),
    ],
)
def test_other_buffers_are_refused(old: str, new: str, says: str, hf: Path, tmp_path: Path) -> None:
    model, args = model_of(hf, 1)
    saved: dict[str, tuple[Tensor, Sequence[Sequence[int]]]] = {name: (tensor, cuts(name, tensor, 1)) for name, tensor in model.items()}
    for state in STATES:
        name = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{state}"
        saved[name.replace(old, new)] = (torch.zeros(64), [[64]])
    assert says in refused(opened(tmp_path / "iter", saved, args))
