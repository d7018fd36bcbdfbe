"""What a run says of the processor that it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.train.run.build import name_device


@pytest.mark.parametrize("multiplies", [False, True], ids=["fp32", "bf16"])
def test_products_of_bf16(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, of runs that have such products, on processors that have no instructions for them."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: multiplies)
    plain, muon = Config(), Config(optimizer=OptimizerConfig(optimizer="muon"))
    bf16 = replace(plain, training=TrainingConfig(bf16=True))
    named = [name_device(config, Mesh.single().device) for config in (plain, muon, bf16)]
    assert ["products of bf16 in fp32" in name for name in named] == [False, not multiplies, not multiplies]
