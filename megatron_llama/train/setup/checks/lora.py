"""The low-rank additions of ``--lora-rank``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.lora import PROJECTIONS, adapter_shapes, projections
from megatron_llama.model.plan.params import kv_copies


def lora_problems(config: Config) -> Iterator[str]:
    """Yield problems of the additions' options, and of --freeze if it leaves no additions to
    train."""
    lora = config.lora
    model = config.model
    complete = (
        min(
            model.num_hidden_layers,
            model.hidden_size,
            model.intermediate_size,
            model.num_attention_heads,
            model.head_dim,
        )
        > 0
    )
    known = projections(model) if model.model_type in FAMILIES else PROJECTIONS
    # The default is LLaMA's; resolve() gives a family its own if there are additions.
    default = lora.lora_target_modules == PROJECTIONS and not lora.lora_rank
    strange = [name for name in lora.lora_target_modules if name not in known and not default]
    if strange or not lora.lora_target_modules:
        got = " ".join(strange) or "nothing"
        yield describe(
            "--lora-target-modules",
            got=got,
            expected=f"some of {', '.join(known)}",
            do=f"separate them by spaces: {got.replace(',', ' ')}"
            if "," in got
            else "correct it or leave it out",
        )
    tp = config.parallel.tensor_model_parallel_size
    apart = kv_copies(model, tp) > 1 if complete and tp > 0 else False
    if (
        lora.lora_rank > 0
        and apart
        and "qkv_proj" in known
        and "qkv_proj" in lora.lora_target_modules
    ):
        # Queries are then a separate weight from keys and values, which have copies; one A for both
        # would get its gradient from two layers.
        yield describe(
            "--lora-target-modules qkv_proj",
            got=f"--tensor-model-parallel-size {tp}",
            expected=f"at most num_key_value_heads {model.num_key_value_heads}",
            do="leave qkv_proj out, or use fewer tensor-parallel ranks",
        )
    if complete and lora.lora_rank > 0 and config.optimizer.freeze:
        names = adapter_shapes(model, lora)
        if names and all(is_frozen(name, config.optimizer.freeze) for name in names):
            got = f"all additions of --lora-rank {lora.lora_rank}"
            yield describe(
                "--freeze",
                got=got,
                expected="one or more that are trained",
                do="leave out a pattern",
            )
