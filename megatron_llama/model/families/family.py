"""The declaration of a model family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.reader import ConfigReader
from megatron_llama.model.families.windows import NO_WINDOWS, Windows
from megatron_llama.model.rope import ROPE_FIELDS


@dataclass(frozen=True)
class OwnFields:
    """Fields of a ModelConfig for which the ``config.json`` of a family has rules of its own."""

    names: tuple[str, ...]
    """Those that no model of the family does without."""
    read: Callable[[ConfigReader, ModelConfig], dict[str, Any]]
    write: Callable[[ModelConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family of decoders, as HuggingFace's transformers has it."""

    model_type: str
    """Its name in ``config.json``."""
    architecture: str
    """The class of its causal language model."""
    classifier: str = ""
    """The class of its reward models, ForSequenceClassification. Empty: transformers has none."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a ModelConfig that are the same in all models of the family, and that its
    ``config.json`` does not have."""
    derived: Mapping[str, Callable[[ModelConfig], Any]] = field(default_factory=dict)
    """Such fields that follow from others."""
    fields: tuple[str, ...] = ()
    """Fields of a ModelConfig that its ``config.json`` has beside those of every family."""
    optional: tuple[str, ...] = ()
    """Those of them that may be null, which stands for 0."""
    integers: tuple[str, ...] = ()
    """Those of them that transformers wants as integers."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Fields that have another name in its ``config.json``: ours -> theirs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of absent fields of a ``config.json`` that differ from LLaMA's. The sizes of
    MODEL_SIZES and vocab_size have no default: a file without them is refused."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further names in published files, with the values that change nothing."""
    windows: Windows = NO_WINDOWS
    """The spelling of sliding windows in its ``config.json``."""
    experts: OwnFields | None = None
    """The spelling of experts in its ``config.json``. None: all its blocks are dense."""
    rope_types: tuple[str, ...] = tuple(ROPE_FIELDS)
    """Rotary scalings that its class in transformers knows."""
    whole_heads: bool = False
    """Whether its class in transformers (from 5.0 on) refuses a hidden_size that is no multiple of
    num_attention_heads, even with a head_dim."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of rotary scalings in its files."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Modules of a block that have another name in the HuggingFace model: ours -> theirs."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of the HuggingFace model that are several of ours, stacked: theirs -> ours, from the
    first row to the last."""
    stacked_experts: bool = False
    """Whether the files have the matrices of all experts of a block in two tensors, [experts,
    inputs, outputs], as LLaMA 4's; otherwise each expert has three of its own."""
    presets: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Published models, by the names of ``--model``."""

    def place(self, module: str, rows: Mapping[str, int]) -> tuple[str, int, int]:
        """Return where the outputs of one of our modules of a block, such as
        ``self_attn.q_proj``, are in the HuggingFace model: its module there, all rows of that
        module, and the first of those rows. ``rows`` has the outputs of each of our modules."""
        for theirs, ours in self.fused.items():
            if module in ours:
                before = sum(rows[name] for name in ours[: ours.index(module)])
                return theirs, sum(rows[name] for name in ours), before
        return self.tensors.get(module, module), rows[module], 0

    def complete(self, model: ModelConfig, given: Collection[str]) -> ModelConfig:
        """Return the model with all values of its family, except the fields that the user has
        ``given``."""
        spelled = {name: self.spelling.get(name, name) for name in (*self.fields, "hidden_act")}
        own = {
            name: type(getattr(model, name))(self.defaults[theirs])
            for name, theirs in spelled.items()
            if theirs in self.defaults
        }
        values = own | self.constants(model)
        return replace(model, **{n: value for n, value in values.items() if n not in given})

    def constants(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields that a model of the family has whatever its ``config.json`` says.
        ``model`` has the fields that these follow from."""
        return {**self.always, **{name: rule(model) for name, rule in self.derived.items()}}
