"""Fields of a model that a foreign folder may leave open: its ``config.json``, its vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.model.hf import model_config_from_hf, read_config_json

LLAMA31_SCALING: Mapping[str, float] = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)
"""The numbers of LLaMA 3.1's rotary scaling, which other programs have as constants."""
LLAMA_KIND: Mapping[str, Any] = MappingProxyType(
    {
        "attention_bias": False,
        "add_qkv_bias": False,
        "mlp_bias": False,
        "qk_norm": "none",
        "norm_position": "before",
        "apply_layernorm_1p": False,
        "hidden_act": "silu",
        "embedding_multiplier": 1.0,
        "query_pre_attn_scalar": 0.0,
        "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": 0.0,
        "sliding_window": 0,
        "layer_types": (),
        "partial_rotary_factor": 1.0,
        "rope_local_base_freq": 0.0,
        "num_labels": 0,
        "num_experts": 0,
    }
)
"""Fields that make a model a plain LLaMA, whatever its family."""
GIVE_CONFIG = "give the model's HuggingFace config.json (--hf-config)"
MATCHING_FILES = "take the files, args and config that belong together"
OPTIMIZER_LEFT_OUT = "the optimizer state of the source is left out: it does not cross formats"
PLAIN_MODELS = "only plain LLaMA models can be converted"


def is_llama31_scaling(scaling: Mapping[str, Any]) -> bool:
    """Whether a rotary scaling is LLaMA 3.1's, whatever its factor."""
    return scaling.get("rope_type") == "llama3" and all(
        scaling[name] == value for name, value in LLAMA31_SCALING.items()
    )


def kind_problems(where: str, model: ModelConfig, held: Collection[str] = ()) -> Iterator[str]:
    """Yield the fields that a format of plain LLaMA models cannot hold, the ``held`` apart."""
    for name, value in LLAMA_KIND.items():
        if name not in held and getattr(model, name) != value:
            do = "take another format: hf and native hold every model"
            if name == "num_experts":
                do += ", torch_dist those of Mixtral and Qwen3-MoE"
            got = getattr(model, name)
            yield describe(f"{where} {name}", got=got, expected=f"{value}, as in LLaMA", do=do)


def read_config(
    path: str | Path | None, own: Mapping[str, Any] | None = None, *, ignored: Collection[str] = ()
) -> tuple[ModelConfig | None, dict[str, Any]]:
    """Return the model and the fields of the user's ``config.json`` at ``path``, or else of
    ``own``, which comes from a file; (None, {}) without either. Unknown fields whose names are
    ``ignored`` are not refused. Raises CheckpointError."""
    if path is None and own is None:
        return None, {}
    config_json = own if path is None else read_config_json(path)
    assert config_json is not None
    model = model_config_from_hf(config_json, where=str(path or "hf_config"), ignored=ignored)
    return model, dict(config_json)


def true_vocab_size(
    where: str,
    stored: int,
    *,
    given: int,
    known: int,
    least: int,
    tokens: int = 0,
    exact: bool = False,
) -> int:
    """Return the number of token ids of a model that stores ``stored`` rows, padding included.

    ``given`` is the user's number, ``known`` the file's, ``tokens`` the tokenizer's. ``least`` is
    the tokenizer's without tokens added behind its vocabulary, for which a model need not have
    rows. 0 stands for "not known". The tokenizer's number counts if no other is known and ``exact``
    says that padding it gives ``stored``. Raises CheckpointError rather than guess the padding."""
    size = given or known or (tokens if exact else 0)
    do = "give the number of token ids: --vocab-size"
    if size == 0:
        has = f" (the tokenizer has {tokens})" if tokens else ""
        got = f"{stored} rows, and no word on how many are padding{has}"
        raise CheckpointError(f"{where} vocabulary", got=got, expected="its true size", do=do)
    if given and known and given != known:
        raise CheckpointError(
            "--vocab-size", got=given, expected=f"{known}, by {where}", do="leave it out"
        )
    if not least <= size <= stored:
        rows = f"at most the {stored} stored rows"
        expected = f"{rows} and at least the tokenizer's {least}" if least else rows
        if known and least > known:
            do = "put the model's own tokenizer there: the size is that of the weights"
        raise CheckpointError(f"{where} vocabulary", got=size, expected=expected, do=do)
    return size
