"""The parameters of a configuration that is being checked."""

from __future__ import annotations

from megatron_llama.config.schema import MODEL_SIZES, Config
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.run_params import whole_model_units


def whole_units(config: Config, *, tp: int = 1) -> tuple[UnitSpec, ...]:
    """Return the units of the whole model on the first of ``tp`` ranks; none for impossible sizes,
    which other checks report."""
    model = config.model
    sizes = [getattr(model, name) for name in (*MODEL_SIZES, "make_vocab_size_divisible_by")]
    # num_key_value_heads and head_dim are derived from others.
    sizes += [model.num_key_value_heads, model.head_dim, tp]
    if min(sizes) <= 0 or model.model_type not in FAMILIES:
        return ()
    return whole_model_units(config, tp=tp)
