"""The low-rank additions of ``--lora-rank``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.plans.params import PROJECTIONS, adapter_shapes, is_frozen


def lora_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the additions' options, and with --freeze if it leaves none to
    train."""
    lora = config.lora
    model = config.model
    if lora.lora_dropout:
        yield describe(
            "--lora-dropout",
            got=lora.lora_dropout,
            expected="0: nothing in a step is random",
            do="leave it out",
        )
    strange = [name for name in lora.lora_target_modules if name not in PROJECTIONS]
    if strange or not lora.lora_target_modules:
        got = " ".join(strange) or "nothing"
        yield describe(
            "--lora-target-modules",
            got=got,
            expected=f"some of {', '.join(PROJECTIONS)}",
            do=f"separate them by spaces: {got.replace(',', ' ')}"
            if "," in got
            else "correct it or leave it out",
        )
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
