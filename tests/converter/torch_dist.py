"""Folders as Megatron-Core's torch_dist writes them, made here from its documented rules, without megatron and without our code."""

from __future__ import annotations

import argparse
import enum
import json
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.converter.distcp import write_folder

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
COLUMN = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", "linear_fc1.weight_w", "linear_fc1.weight_v")
"""Tensors that tensor ranks share by rows; by columns they share those of ROW."""
ROW = ("linear_proj.weight", "linear_fc2.weight")
PLAIN = types.ModuleType("megatron.core.enums")
PLAIN.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=PLAIN.__name__)  # type: ignore[attr-defined]


def by_group(parts: Sequence[Tensor], groups: int) -> Tensor:
    """For each key/value head its queries, its key, its value."""
    rows = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, *rows) for part in parts], dim=1).reshape(-1, *rows)


def layer_tensors(hf: Mapping[str, Tensor], layer: int, heads: int, groups: int) -> dict[str, Tensor]:
    """A layer under the names of TransformerEngine's modules."""
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): tensor for name, tensor in hf.items() if name.startswith(prefix)}
    if "self_attn.qkv_proj.weight" in own:
        fused = own.pop("self_attn.qkv_proj.weight")
        width = len(fused) // (heads + 2 * groups)
        for name, part in zip("qkv", fused.split([heads * width, groups * width, groups * width]), strict=True):
            own[f"self_attn.{name}_proj.weight"] = part
        own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"] = own.pop("mlp.gate_up_proj.weight").chunk(2)
    found = {
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            found[f"self_attention.linear_qkv.{kind}"] = by_group([own[f"self_attn.{name}_proj.{kind}"] for name in "qkv"], groups)
        if f"self_attn.o_proj.{kind}" in own:
            found[f"self_attention.linear_proj.{kind}"] = own[f"self_attn.o_proj.{kind}"]
        if f"mlp.gate_proj.{kind}" in own:
            found[f"mlp.linear_fc1.{kind}"] = torch.cat([own[f"mlp.gate_proj.{kind}"], own[f"mlp.up_proj.{kind}"]])
            found[f"mlp.linear_fc2.{kind}"] = own[f"mlp.down_proj.{kind}"]
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in own:
            found[f"self_attention.{name}_layernorm.weight"] = own[f"self_attn.{name}_norm.weight"]
    return found


def model_tensors(hf: Mapping[str, Tensor], args: argparse.Namespace, *, local: bool, keys: str) -> dict[str, Tensor]:
    """The tensors by their keys: ``stacked`` over layers, ``single``, or single with the ``halves`` of fc1 on their own."""

    def padded(weight: Tensor) -> Tensor:
        return torch.cat([weight, weight.new_full((args.padded_vocab_size - len(weight), weight.shape[1]), 9.0)])

    found = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if args.untie_embeddings_and_output_weights:
        found["output_layer.weight"] = padded(hf["lm_head.weight"])
    layers = [layer_tensors(hf, layer, args.num_attention_heads, args.num_query_groups) for layer in range(args.num_layers)]
    for name in layers[0]:
        theirs = LOCAL_NORMS.get(name, name) if local else name
        each = [layer[name] for layer in layers]
        if keys == "stacked":
            found[f"decoder.layers.{theirs}"] = torch.stack(each)
        elif keys == "halves" and name == "mlp.linear_fc1.weight":
            for end, half in (("_w", 0), ("_v", 1)):
                found |= {f"decoder.layers.{number}.{theirs}{end}": tensor.chunk(2)[half] for number, tensor in enumerate(each)}
        else:
            found |= {f"decoder.layers.{number}.{theirs}": tensor for number, tensor in enumerate(each)}
    return found


def cuts(name: str, tensor: Tensor, tp: int) -> list[list[int]]:
    """The pieces that tensor ranks save of a tensor, a layer at a time."""
    stacked = name.startswith("decoder.layers.") and not name.split(".")[2].isdecimal()
    pieces = [[1] * size if stacked and dim == 0 else [size] for dim, size in enumerate(tensor.shape)]
    # Gate and up projection are saved apart from each other.
    parts = tp * (2 if name.endswith(("linear_fc1.weight", "linear_fc1.bias")) else 1)
    if name.endswith((*COLUMN, "word_embeddings.weight", "output_layer.weight")):
        pieces[int(stacked)] = [tensor.shape[int(stacked)] // parts] * parts
    if name.endswith(ROW):
        pieces[-1] = [tensor.shape[-1] // tp] * tp
    return pieces


def save(
    folder: Path,
    hf: Mapping[str, Tensor],
    args: argparse.Namespace,
    *,
    local: bool = False,
    keys: str = "stacked",
    more: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``iter_0000003`` with its tracker, Adam's moments of one tensor and random states beside the model, and return ``folder``."""
    tp = args.tensor_model_parallel_size
    tensors = {**model_tensors(hf, args, local=local, keys=keys), **(more or {})}
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones_like(hf["model.norm.weight"], dtype=torch.float32)
    objects = {"rng_state/shard_0.0_1.1": [1, 2], "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": None}
    inner = folder / "iter_0000003"
    write_folder(inner, {name: (tensor, cuts(name, tensor, tp)) for name, tensor in tensors.items()}, objects, ranks=3)
    (inner / "metadata.json").write_text(json.dumps(BACKEND))
    write_common(inner, args)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def write_common(inner: Path, args: argparse.Namespace) -> None:
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "content_metadata": {"singleton_local_shards": False}}
    # torch.save imports the module of an enum to name it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, PLAIN.__name__, PLAIN)
        torch.save(content, inner / "common.pt")


def arguments(fields: Mapping[str, Any], *, tp: int = 1, **more: Any) -> argparse.Namespace:
    """Megatron-LM's arguments for a config.json."""
    unit = 128 * tp
    kind: Any = PLAIN
    return argparse.Namespace(
        **{
            "num_layers": fields["num_hidden_layers"],
            "hidden_size": fields["hidden_size"],
            "ffn_hidden_size": fields["intermediate_size"],
            "num_attention_heads": fields["num_attention_heads"],
            "group_query_attention": True,
            "num_query_groups": fields["num_key_value_heads"],
            "kv_channels": fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]),
            "max_position_embeddings": fields["max_position_embeddings"],
            "norm_epsilon": fields["rms_norm_eps"],
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "rotary_base": 10000,
            "rotary_percent": 1.0,
            "untie_embeddings_and_output_weights": not fields["tie_word_embeddings"],
            "make_vocab_size_divisible_by": 128,
            "padded_vocab_size": -(-fields["vocab_size"] // unit) * unit,
            "tokenizer_type": "NullTokenizer",
            "vocab_size": fields["vocab_size"] - 1,
            "tensor_model_parallel_size": tp,
            "num_experts": None,
            "multi_latent_attention": False,
            "params_dtype": torch.bfloat16,
            "model_type": kind.ModelType.encoder_or_decoder,
            "exit_signal": signal.SIGTERM,
            **more,
        }
    )
