"""Checks that the HuggingFace folder of a run has the model that it has trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.config.schema import LoraConfig
from megatron_llama.converter.verify.logits import TOLERANCE, StreamedModel, logit_deviation
from megatron_llama.converter.verify.reference import TransformersModel, obstacle
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.prove.compare import Row, distance
from megatron_llama.prove.materials import Materials, folder_weights
from megatron_llama.prove.reference import NotComparedError, last_line, quiet
from megatron_llama.prove.run import Trained, states

EXPORT = "export"
MERGED = 1e-6
"""Bound of merged weights in fp32: the writer decides the precision of merging."""
MERGED_BF16 = 2.0**-8
ALIKE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
"""Fields of config.json with the names of options."""
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
    }
)
"""transformers' classes by model_type."""
IGNORED = frozenset({"dtype", "torch_dtype", "transformers_version"})
"""Fields of config.json that do not affect the computation."""


def rows_of_export(trained: Trained, materials: Materials) -> Iterator[Row]:
    """Yield the comparison of a run's exported folder with its last checkpoint, tensor by tensor,
    and of transformers' logits for the folder with those of our model for the checkpoint."""
    assert trained.export is not None, "the run has exported nothing"
    last = trained.iterations[-1]
    weights = folder_weights(trained.export, trained.config.model)
    dtype = torch.bfloat16 if trained.config.training.bf16 else torch.float32
    lora = trained.config.lora
    saved = states(trained.checkpoints[last]).master
    expected = merged(saved, lora)
    for name in sorted(weights.keys() | expected.keys()):
        if name not in weights or name not in expected:
            where = "the checkpoint" if name in weights else "the exported folder"
            yield Row(EXPORT, "weight", math.inf, 0.0, last, name, f"{where} does not have it")
            continue
        bound = 0.0
        if lora.lora_rank and _adapter(name, "A") in saved:
            bound = MERGED if dtype == torch.float32 else MERGED_BF16
        got, want = weights[name], expected[name].to(dtype)
        same = got.dtype == dtype and torch.equal(got, want)
        yield Row(
            EXPORT, "weight", 0.0 if same else distance(got, want) or math.inf, bound, last, name
        )
    yield from _config_rows(trained, trained.export, materials)
    yield from _logit_rows(trained, trained.export, weights, materials)


def merged(saved: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Return the weights of a checkpoint with low-rank additions merged: W + alpha / rank B A.

    Weights with an addition are in fp64, since a run in fp16 keeps frozen weights in fp16 and
    exports fp32."""
    weights = {name: tensor for name, tensor in saved.items() if ".lora_" not in name}
    for name, weight in weights.items():
        first, second = _adapter(name, "A"), _adapter(name, "B")
        if first in saved:
            addition = saved[second].double() @ saved[first].double()
            weights[name] = weight.double() + lora.lora_alpha / lora.lora_rank * addition
    return weights


def _adapter(name: str, which: str) -> str:
    return f"{name.removesuffix('.weight')}.lora_{which}.weight"


def _config_rows(trained: Trained, exported: Path, materials: Materials) -> Iterator[Row]:
    """Yield the comparison of config.json with the values of its fields by transformers'
    documentation, and otherwise with those of the folder with which the run began."""
    file = exported / "config.json"
    if not file.exists():
        yield Row(EXPORT, "config.json", 1.0, 0.0, note="there is none")
        return
    config = json.loads(file.read_text())
    before = json.loads((materials.model / "config.json").read_text())
    expected = {name: before.get(name) for name in (config.keys() | before.keys()) - IGNORED}
    for name, value in {**expected, **_documented(trained, materials)}.items():
        same = config.get(name) == value
        note = "" if same else f"{name}: {config.get(name)} instead of {value}"
        yield Row(EXPORT, "config.json", float(not same), 0.0, note=note)


def _documented(trained: Trained, materials: Materials) -> dict[str, object]:
    """Return fields of config.json by transformers' documentation, independent of our writer."""
    model = trained.config.model
    gemma = model.model_type.startswith("gemma")
    # There intermediate_size is the width of experts.
    widths = {
        "intermediate_size": model.moe_intermediate_size,
        "intermediate_size_mlp": model.intermediate_size,
    }
    return {
        **{name: getattr(model, name) for name in ALIKE},
        **(widths if model.model_type == "llama4_text" else {}),
        "architectures": [ARCHITECTURES[model.model_type]],
        "hidden_activation" if gemma else "hidden_act": model.hidden_act,
        "vocab_size": materials.vocab_size,
        "bos_token_id": materials.options["bos_token_id"],
        "eos_token_id": materials.options["eos_token_id"],
        "dtype": "bfloat16" if trained.config.training.bf16 else "float32",
    }


def _logit_rows(
    trained: Trained, exported: Path, weights: Mapping[str, Tensor], materials: Materials
) -> Iterator[Row]:
    """Yield the comparison with transformers' logits, which reads the folder by itself. Raises
    NotComparedError without transformers."""
    model = trained.config.model
    reason = obstacle(model)
    if reason is not None:
        raise NotComparedError(f"logits with transformers: {reason}")

    def source(rectangle: Rectangle, out: Tensor) -> None:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        out.copy_(weights[rectangle.name][place])

    tokens = _tokens(materials, trained.config.training.seq_length)
    with quiet():
        try:
            theirs = TransformersModel(exported, model)
        except Exception as error:  # transformers' checks of a configuration raise many kinds
            raise NotComparedError(f"transformers refuses the model: {last_line(error)}") from error
        theirs.run(tokens)
    ours = StreamedModel(model, source, tokens)
    deviation = logit_deviation(ours, theirs, model.vocab_size)
    got = deviation.largest / max(1.0, deviation.spread)
    yield Row(EXPORT, "logits", got, TOLERANCE, note=f"with transformers, of {len(tokens)} tokens")


def _tokens(materials: Materials, length: int) -> Tensor:
    """Return the tokens of a text as long as a sample."""
    texts = [text for documents in materials.documents.values() for text in documents]
    texts += [talk.ids for talk in materials.talks]
    ids = [token for text in texts for token in text]
    # The tokens are not known if a built-in template makes them.
    ids = ids or list(range(materials.vocab_size))
    return torch.tensor(ids[:length])
