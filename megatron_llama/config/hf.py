"""HuggingFace ``config.json`` <-> ``ModelConfig``, in the spelling of transformers 4 and of
transformers 5.

transformers 4: ``rope_theta``, ``rope_scaling`` (``rope_type``, earlier ``type``), ``torch_dtype``.
transformers 5: ``rope_parameters`` (rope_type, rope_theta, factor, ...), ``dtype``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_llama.config.hf_fields import field_problems
from megatron_llama.config.rope import normal_rope, rope_problems
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError, describe, listing


def read_hf_config(folder: str | Path, *, ignored: Collection[str] = ()) -> ModelConfig:
    """The model of a HuggingFace folder, as ``model_config_from_hf`` reads it. Raises
    CheckpointError when ``config.json`` is missing, damaged or no LLaMA."""
    path = Path(folder) / "config.json"
    return model_config_from_hf(read_config_json(path), where=str(path), ignored=ignored)


def read_config_json(path: str | Path) -> dict[str, Any]:
    """The content of a ``config.json``. Raises CheckpointError when it is missing or damaged."""
    try:
        config_json = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        do = "give a HuggingFace folder (config.json, *.safetensors)"
        raise CheckpointError(
            describe(str(path), got=error.strerror or error, expected="a readable file", do=do)
        ) from error
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(
            describe(f"{path}{line}", got=error, expected="valid JSON", do="copy the file again")
        ) from error
    if not isinstance(config_json, dict):
        raise CheckpointError(
            describe(
                str(path),
                got=type(config_json).__name__,
                expected="a JSON object",
                do="copy the file again",
            )
        )
    return config_json


def model_config_from_hf(
    config_json: Mapping[str, Any], *, where: str, ignored: Collection[str] = ()
) -> ModelConfig:
    """The model fields of a ``config.json``. ``where`` is its path, for messages.

    Absent fields have the defaults of transformers' ``LlamaConfig``, sizes excepted: those must be
    there. Of several end-of-sequence tokens the first counts. Raises CheckpointError with every
    field that is wrong or not LLaMA, and with those that are not known to be harmless, unless their
    names are ``ignored``.
    """
    reader = _Reader(config_json, where)
    reader.refuse_other_architectures()
    reader.problems.extend(field_problems(config_json, ignored, where=where))
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    head_dim = reader.size("head_dim", default=0)
    if head_dim == 0 and heads > 0:
        if hidden % heads:
            reader.problem(
                "hidden_size",
                hidden,
                f"a multiple of num_attention_heads {heads}",
                "or give head_dim",
            )
        head_dim = hidden // heads
    theta, scaling = reader.rope()
    model = ModelConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_hidden_layers=reader.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=reader.size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        max_position_embeddings=reader.size("max_position_embeddings", default=2048),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config_json.get("tie_word_embeddings", False)),
        initializer_range=reader.number("initializer_range", default=0.02),
        bos_token_id=reader.token("bos_token_id"),
        eos_token_id=reader.token("eos_token_id"),
    )
    if reader.problems:
        raise CheckpointError(
            listing(f"{where} is no LLaMA that can be used here:", reader.problems)
        )
    return model


def hf_config_from_model(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """A ``config.json`` for ``LlamaForCausalLM`` that transformers 4 and 5 read alike.

    ``model``: every derived field filled in. ``dtype``: name of the saved weights' dtype, such as
    ``bfloat16``.
    """
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    numbers = {
        name: getattr(model, name) for name in (*sizes, "head_dim", "max_position_embeddings")
    }
    assert all(numbers.values()), f"derived fields are not filled in: {numbers}"
    scaling = normal_rope(model.rope_scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **numbers,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_type": "default",
            **(scaling or {}),
            "rope_theta": model.rope_theta,
        },
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


class _Reader:
    """Reads typed fields of a ``config.json`` and collects what is wrong."""

    def __init__(self, config_json: Mapping[str, Any], where: str) -> None:
        self.json = config_json
        self.where = where
        self.problems: list[str] = []

    def problem(self, name: str, got: object, expected: str, do: str) -> None:
        self.problems.append(describe(f"{self.where} {name}", got=got, expected=expected, do=do))

    def refuse_other_architectures(self) -> None:
        kind = self.json.get("model_type", "llama")
        if kind != "llama":
            self.problem("model_type", repr(kind), "'llama'", "only LLaMA models can be read")
        names = self.json.get("architectures") or ["LlamaForCausalLM"]
        # Conversions of early 2023 write LLaMAForCausalLM.
        if [str(name).lower() for name in names] != ["llamaforcausallm"]:
            self.problem(
                "architectures",
                names,
                "['LlamaForCausalLM']",
                "only causal LLaMA models can be read",
            )

    def size(self, name: str, *, default: int | None = None) -> int:
        """A positive integer; absent and null mean ``default``. 0 stands for a size that was
        refused."""
        value = self.json.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.problem(
                name,
                "nothing" if value is None else repr(value),
                "a positive integer",
                "copy the model's own config.json",
            )
            return 0
        return value

    def number(self, name: str, *, default: float) -> float:
        return self._positive(name, self.json.get(name, default))

    def _positive(self, name: str, value: Any) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            self.problem(name, repr(value), "a positive number", "copy the model's own config.json")
            return 1.0
        return float(value)

    def token(self, name: str) -> int | None:
        value = self.json.get(name)
        first = value[0] if isinstance(value, list) and value else value
        if first is not None and (isinstance(first, bool) or not isinstance(first, int)):
            self.problem(
                name,
                repr(value),
                "a token id or a list of them",
                "copy the model's own config.json",
            )
            return None
        return first

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling). A file that carries both spellings, as ours do, must say the same in
        both."""
        present = [
            name for name in ("rope_parameters", "rope_scaling") if self.json.get(name) is not None
        ]
        found = [self._rope(name, self.json[name]) for name in present] or [
            self._rope("rope_scaling", {})
        ]
        if any(other != found[0] for other in found):
            self.problem(
                " and ".join(present),
                " against ".join(map(str, found)),
                "the same rotary embedding",
                "remove the wrong one",
            )
        return found[0]

    def _rope(self, name: str, raw: Any) -> tuple[float, dict[str, Any] | None]:
        fields = dict(raw) if isinstance(raw, Mapping) else raw
        outer = self.json.get("rope_theta")
        inner = None
        if isinstance(fields, dict):
            inner = fields.pop("rope_theta", None)
            fields.setdefault("rope_type", fields.get("type", "default"))
            fields.pop("type", None)
            if fields.get("partial_rotary_factor") in (None, 1.0):
                fields.pop("partial_rotary_factor", None)
        if inner is not None and outer is not None and inner != outer:
            self.problem(f"{name}.rope_theta", inner, f"rope_theta {outer}", "remove the wrong one")
        problems = rope_problems(f"{self.where} {name}", fields)
        self.problems.extend(problems)
        theta = next((value for value in (inner, outer) if value is not None), 10000.0)
        return self._positive(f"{name}.rope_theta", theta), None if problems else normal_rope(
            fields
        )
