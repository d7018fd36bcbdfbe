"""Names, arguments and tensors of Meta's own checkpoints: ``consolidated.NN.pth`` for each
tensor-parallel rank of their code, and ``params.json``.

Rows of q and k are ordered for rotary pairs that are neighbours. The embedding is cut by columns in
the code of LLaMA 1 and 2 and by rows in that of LLaMA 3. Fields that params.json does not have are
kept in a ``config.json`` beside it, which their code ignores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_llama.checkpoint.model_folders.model_fields import is_llama31_scaling
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.tensor_map import TensorMap
from megatron_llama.engine.plan.specs import HFSlice
from megatron_llama.errors import describe
from megatron_llama.model.plan.params import stage_units, whole_model

PARAMS = "params.json"
PARAMS_READ = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "multiple_of",
    "ffn_dim_multiplier",
    "max_seq_len",
    "max_batch_size",
)
"""Fields of a LLaMA 1, 2 or 3. The width of the MLP is taken from its weights, and the last two are
the size of a cache. The files of LLaMA 4 and of other kinds have more fields."""
EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"
BLOCK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm.weight": ("attention_norm.weight",),
        "self_attn.qkv_proj.weight": (
            "attention.wq.weight",
            "attention.wk.weight",
            "attention.wv.weight",
        ),
        "self_attn.o_proj.weight": ("attention.wo.weight",),
        "post_attention_layernorm.weight": ("ffn_norm.weight",),
        "mlp.gate_up_proj.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
        "mlp.down_proj.weight": ("feed_forward.w2.weight",),
    }
)
"""Names of a block's weights: ours -> theirs, one for each slice of a fused weight."""
OUTSIDE_BLOCKS: Mapping[str, str] = MappingProxyType(
    {HF_EMBEDDING: EMBEDDING, "model.norm.weight": "norm.weight", HF_HEAD: OUTPUT}
)
"""Names of the other weights: ours -> theirs."""


def file_tensors(
    model: ModelConfig, files: int, rank: int, *, by_rows: bool
) -> dict[str, TensorMap]:
    """Return the tensors of one file by their names. ``by_rows`` says how the embedding is cut. A
    head is always included: if the model has none, it is a copy."""
    # Their code pads nothing: the vocabulary is a multiple of the number of files.
    plain = replace(model, make_vocab_size_divisible_by=1, tie_word_embeddings=False)
    units = stage_units(plain, whole_model(plain), 0, tp=files, tp_rank=rank)
    maps = {}
    for spec in (spec for unit in units for spec in unit.params):
        whole = TensorMap.of(spec)
        if spec.name in OUTSIDE_BLOCKS:
            maps[OUTSIDE_BLOCKS[spec.name]] = whole
            continue
        _, _, layer, own = spec.name.split(".", 3)
        for index, name in enumerate(BLOCK[own]):
            rotary = name in ("attention.wq.weight", "attention.wk.weight")
            head = model.head_dim if rotary else 0
            maps[f"layers.{layer}.{name}"] = whole.one_slice(index, head)
    if not by_rows:
        cols = model.hidden_size // files
        shape = (model.vocab_size, model.hidden_size)
        piece = HFSlice(HF_EMBEDDING, shape, 0, model.vocab_size, hf_col=rank * cols)
        maps[EMBEDDING] = TensorMap((model.vocab_size, cols), (piece,))
    return maps


def split_problems(model: ModelConfig, files: int) -> Iterator[str]:
    """Yield the reasons why the model cannot be cut into so many files."""
    sizes = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "hidden_size",
    )
    for name in sizes:
        if getattr(model, name) % files:
            got = f"{name} {getattr(model, name)}"
            do = "give another number of files (--tensor-model-parallel-size)"
            yield describe(f"{files} files", got=got, expected=f"a multiple of {files}", do=do)


def make_params(model: ModelConfig) -> dict[str, Any]:
    """Return a params.json for their code, which takes no other fields than its own."""
    multiple, factor = _width_rule(model.hidden_size, model.intermediate_size)
    params = {
        "dim": model.hidden_size,
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": factor,
        "norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "use_scaled_rope": (model.rope_scaling or {}).get("rope_type") == "llama3" or None,
    }
    # The code of LLaMA 1 knows neither shared heads nor a base.
    usual = {"n_kv_heads": model.num_attention_heads, "rope_theta": 10000.0}
    return {
        name: value
        for name, value in params.items()
        if value is not None and usual.get(name) != value
    }


def mlp_width(dim: int, multiple: int, factor: float | None) -> int:
    """Return the width of the MLP by the rule of their code."""
    width = int(2 * 4 * dim / 3)
    if factor is not None:
        width = int(factor * width)
    return -(-width // multiple) * multiple


def _width_rule(dim: int, width: int) -> tuple[int, float | None]:
    """Return a (multiple_of, ffn_dim_multiplier) that give ``width``: those of a published model
    if possible."""
    published = ((256, None), (4096, 1.3), (1024, 1.3), (1024, 1.4), (256, 1.5), (1024, 1.5))
    for multiple, factor in published:
        if mlp_width(dim, multiple, factor) == width:
            return multiple, factor
    return 1, (width + 0.5) / int(2 * 4 * dim / 3)


def lost_fields(model: ModelConfig) -> Iterator[str]:
    """Yield the fields that Meta's code cannot express. config.json keeps them for the way back,
    but their code does not use them."""
    scaling = model.rope_scaling or {}
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        yield "head_dim"
    if scaling and not is_llama31_scaling(scaling):
        yield "rope_scaling"
