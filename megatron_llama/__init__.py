"""Megatron-style 3D-parallel training of LLaMA on PyTorch, and its engine around any module.

``import megatron_llama as ml`` takes milliseconds: what it exports, and torch with it, is imported
at its first use. docs/api.md describes all of it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_llama.config.schema import Config
    from megatron_llama.converter.api.convert import Converted, convert
    from megatron_llama.converter.api.merge import Merged, merge
    from megatron_llama.converter.api.verify import Verified, verify
    from megatron_llama.data.preprocess import PreprocessReport
    from megatron_llama.engine.options import LossScaling
    from megatron_llama.engine.shard.engine import ModuleEngine
    from megatron_llama.engine.shard.more_optimizers import ScheduleFreeAdamW, elementwise
    from megatron_llama.engine.shard.muon import Muon
    from megatron_llama.engine.shard.optimizer import AdamW
    from megatron_llama.engine.shard.shard import shard
    from megatron_llama.engine.shard.unit_policies import unit
    from megatron_llama.engine.shard.user_groups import group
    from megatron_llama.errors import UserError
    from megatron_llama.planner.api.plan import Plan, PlannedLayout, plan
    from megatron_llama.train.api.common.trained import Trained
    from megatron_llama.train.api.generate import Generated, generate
    from megatron_llama.train.api.load import load
    from megatron_llama.train.api.preprocess import preprocess
    from megatron_llama.train.api.save_hf import SavedHF, save_hf
    from megatron_llama.train.api.train import train
    from megatron_llama.train.run.callbacks import Callback, Run, Step
    from megatron_llama.train.run.result import TrainResult
    from megatron_llama.tune.api.align import align
    from megatron_llama.tune.api.sft import sft

__version__: str  # found at its first use, as the others: it may take a call of git
__all__ = (
    "AdamW",
    "Callback",
    "Config",
    "Converted",
    "Generated",
    "LossScaling",
    "Merged",
    "ModuleEngine",
    "Muon",
    "Plan",
    "PlannedLayout",
    "PreprocessReport",
    "Run",
    "SavedHF",
    "ScheduleFreeAdamW",
    "Step",
    "TrainResult",
    "Trained",
    "UserError",
    "Verified",
    "__version__",
    "align",
    "convert",
    "elementwise",
    "generate",
    "group",
    "load",
    "merge",
    "plan",
    "preprocess",
    "save_hf",
    "sft",
    "shard",
    "train",
    "unit",
    "verify",
)

_MODULES = MappingProxyType(
    {
        "AdamW": "engine.shard.optimizer",
        "Callback": "train.run.callbacks",
        "Config": "config.schema",
        "Converted": "converter.api.convert",
        "Generated": "train.api.generate",
        "LossScaling": "engine.options",
        "Merged": "converter.api.merge",
        "ModuleEngine": "engine.shard.engine",
        "Muon": "engine.shard.muon",
        "Plan": "planner.api.plan",
        "PlannedLayout": "planner.api.plan",
        "PreprocessReport": "data.preprocess",
        "Run": "train.run.callbacks",
        "SavedHF": "train.api.save_hf",
        "ScheduleFreeAdamW": "engine.shard.more_optimizers",
        "Step": "train.run.callbacks",
        "TrainResult": "train.run.result",
        "Trained": "train.api.common.trained",
        "UserError": "errors",
        "Verified": "converter.api.verify",
        "align": "tune.api.align",
        "convert": "converter.api.convert",
        "elementwise": "engine.shard.more_optimizers",
        "generate": "train.api.generate",
        "group": "engine.shard.user_groups",
        "load": "train.api.load",
        "merge": "converter.api.merge",
        "plan": "planner.api.plan",
        "preprocess": "train.api.preprocess",
        "save_hf": "train.api.save_hf",
        "sft": "tune.api.sft",
        "shard": "engine.shard.shard",
        "train": "train.api.train",
        "unit": "engine.shard.unit_policies",
        "verify": "converter.api.verify",
    }
)
"""The module and the name of each export."""


class _Package(ModuleType):
    """A package in which a function may be called like a room, as ``train`` is.

    The import of a submodule sets it as an attribute of its package. Here the function keeps the
    name: rooms are imported by ``from megatron_llama.train...``, which asks for no attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = import_module(f"{__name__}.config.version").version()
    elif name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next use finds it without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
