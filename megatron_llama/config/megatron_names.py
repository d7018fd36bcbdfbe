"""Megatron's names for options that carry another name here, and Megatron's switches that every
LLaMA needs.

Most Megatron flags need no alias: ``--micro-batch-size``, ``--lr``, ``--seq-length`` and so on are
field names in ``schema.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Alias:
    """Another name for an option.

    An alias with a ``value`` is a switch (it takes no word, or true/false); any other takes the
    value of its field.
    """

    field: str | None = None
    """The option it sets. None: it sets nothing, and is refused unless it says what is so here
    anyway."""
    value: str | None = None
    """The text that the switch stands for, read as the field's value; with no field: the only
    boolean that is accepted."""
    convert: Callable[[str], str] | None = None
    """Text as Megatron has it -> text for the field. Raises ValueError with what is expected."""
    help: str = ""
    """What it does here, and the remedy when it is refused."""
    implies: tuple[str, str] | None = None
    """Another option and its text, where the switch is on and that option is not given."""


def only(*accepted: str, meaning: str | None = None) -> Callable[[str], str]:
    """A check that accepts some words, each as it is or as ``meaning``."""

    def check(text: str) -> str:
        if text not in accepted:
            raise ValueError(" or ".join(accepted))
        return text if meaning is None else meaning

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
_ORDER = "Megatron shuffles the samples with either; here --data-order decides"

MEGATRON: Mapping[str, Alias] = MappingProxyType(
    {
        "model": Alias("preset"),
        "num_layers": Alias("num_hidden_layers"),
        "ffn_hidden_size": Alias("intermediate_size"),
        "num_query_groups": Alias("num_key_value_heads"),
        "group_query_attention": Alias(
            value="true",
            help="--num-query-groups alone decides; leave that out for multi-head attention",
        ),
        "norm_epsilon": Alias("rms_norm_eps"),
        "layernorm_epsilon": Alias("rms_norm_eps"),
        "rotary_base": Alias("rope_theta"),
        "init_method_std": Alias("initializer_range"),
        "untie_embeddings_and_output_weights": Alias("tie_word_embeddings", value="false"),
        "tokenizer_name_or_path": Alias("tokenizer_model"),
        "use_distributed_optimizer": Alias("data_parallel_sharding_strategy", value="optim"),
        "overlapped_distributed_optimizer": Alias(
            "data_parallel_sharding_strategy",
            value="optim_grads",
            implies=("reduce_bucket_size", "5e8"),
        ),
        "recompute_activations": Alias("recompute_granularity", value="selective"),
        "dataloader_type": Alias(
            "data_order", convert=only("cyclic", "single", meaning="shuffled"), help=_ORDER
        ),
        "swiglu": Alias(value="true", help=_LLAMA),
        "use_rotary_position_embeddings": Alias(value="true", help=_LLAMA),
        "no_position_embedding": Alias(value="true", help=_LLAMA),
        "disable_bias_linear": Alias(value="true", help=_LLAMA),
        "normalization": Alias(convert=only("RMSNorm"), help=_LLAMA),
        "RMSNorm": Alias(value="true", help=_LLAMA),
        "causal_lm": Alias(value="true", help=_LLAMA),
        "use_flash_attn": Alias(
            value="true",
            help="attention is torch's SDPA, which brings the flash kernels: accepted, changes "
            "nothing",
        ),
        "no_gradient_accumulation_fusion": Alias(
            value="true",
            help="gradients are always written into the buffers that are reduced, without "
            "apex: accepted, changes nothing",
        ),
        "data_impl": Alias(
            convert=only("mmap"),
            help="datasets are always memory-mapped: accepted, changes nothing",
        ),
        "override_opt_param_scheduler": Alias(
            value="true",
            help="the learning rate always follows the options, never a checkpoint: accepted, "
            "changes nothing",
        ),
        "position_embedding_type": Alias(convert=only("rope"), help=_LLAMA),
        "attention_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "hidden_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "num_virtual_stages_per_pipeline_rank": Alias("virtual_pipeline_model_parallel_size"),
    }
)


def _replaced_by(option: str) -> Callable[[str], str]:
    """A converter that accepts nothing, for an option that another one has replaced."""

    def refuse(text: str) -> str:
        raise ValueError(option)

    return refuse


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        # `from` is a keyword of Python, so no field can have that name.
        "from": Alias("source_format"),
        "png": Alias(
            "svg",
            convert=_replaced_by("--svg FILE"),
            help="drawings are written as SVG, which every browser shows: give --svg FILE",
        ),
    }
)
"""Other names of options of single commands; a command without that option does not know them."""
