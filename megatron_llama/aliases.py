"""Megatron's names for options that carry another name here, and Megatron's switches that every LLaMA needs.

Most Megatron flags need no alias: ``--micro-batch-size``, ``--lr``, ``--seq-length`` and so on are field names in ``config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Alias:
    """Another name for an option.

    An alias with a ``value`` is a switch (it takes no word, or true/false); any other takes the value of its field.
    """

    field: str | None = None
    """The option it sets. None: it sets nothing, and is refused unless it says what is so here anyway."""
    value: str | None = None
    """The text that the switch stands for, read as the field's value; with no field: the only boolean that is accepted."""
    convert: Callable[[str], str] | None = None
    """Text as Megatron has it -> text for the field. Raises ValueError with what is expected."""
    help: str = ""
    """What it does here, and the remedy when it is refused."""


def only(word: str) -> Callable[[str], str]:
    """A check that accepts one word."""

    def check(text: str) -> str:
        if text != word:
            raise ValueError(word)
        return text

    return check


def zero(text: str) -> str:
    """Accept 0 in any spelling of a number."""
    try:
        is_zero = float(text) == 0.0
    except ValueError:
        is_zero = False
    if not is_zero:
        raise ValueError("0")
    return text


_LLAMA = "every LLaMA has it: accepted, changes nothing"
_NO_DROPOUT = "LLaMA is trained without dropout: only 0 is accepted"

MEGATRON: Mapping[str, Alias] = MappingProxyType(
    {
        "model": Alias("preset"),
        "num_layers": Alias("num_hidden_layers"),
        "ffn_hidden_size": Alias("intermediate_size"),
        "num_query_groups": Alias("num_key_value_heads"),
        "group_query_attention": Alias(value="true", help="--num-query-groups alone decides; leave that out for multi-head attention"),
        "norm_epsilon": Alias("rms_norm_eps"),
        "layernorm_epsilon": Alias("rms_norm_eps"),
        "rotary_base": Alias("rope_theta"),
        "init_method_std": Alias("initializer_range"),
        "untie_embeddings_and_output_weights": Alias("tie_word_embeddings", value="false"),
        "tokenizer_name_or_path": Alias("tokenizer_model"),
        "use_distributed_optimizer": Alias("data_parallel_sharding_strategy", value="optim"),
        "overlapped_distributed_optimizer": Alias("data_parallel_sharding_strategy", value="optim_grads"),
        "swiglu": Alias(value="true", help=_LLAMA),
        "use_rotary_position_embeddings": Alias(value="true", help=_LLAMA),
        "no_position_embedding": Alias(value="true", help=_LLAMA),
        "disable_bias_linear": Alias(value="true", help=_LLAMA),
        "normalization": Alias(convert=only("RMSNorm"), help=_LLAMA),
        "position_embedding_type": Alias(convert=only("rope"), help=_LLAMA),
        "attention_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "hidden_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "num_virtual_stages_per_pipeline_rank": Alias("virtual_pipeline_model_parallel_size"),
    }
)

CONVERT: Mapping[str, Alias] = MappingProxyType({"from": Alias("source_format")})
"""A name that no field can have."""
