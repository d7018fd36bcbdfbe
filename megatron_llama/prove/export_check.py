"""Whether the HuggingFace folder of a run is the model that it has trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_llama.config.schema import LoraConfig
from megatron_llama.converter.verify.logits import TOLERANCE, StreamedModel, logit_deviation
from megatron_llama.converter.verify.reference import TransformersModel, obstacle
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.prove.compare import Row, distance
from megatron_llama.prove.materials import Materials
from megatron_llama.prove.reference import NotComparedError, last_line, quiet
from megatron_llama.prove.run import Trained, states

EXPORT = "export"
MERGED = 1e-6
"""An addition of low rank is merged in a precision that is the writer's."""
MERGED_BF16 = 2.0**-8
ALIKE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
"""Fields of config.json that the options of a run have by the same names."""
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
    }
)
"""transformers' classes by model_type."""
IGNORED = frozenset({"dtype", "torch_dtype", "transformers_version"})
"""Fields of config.json that say nothing of what is computed."""


def rows_of_export(trained: Trained, materials: Materials) -> Iterator[Row]:
    """Compare the folder that a run has exported with its last checkpoint, tensor by tensor, and
    transformers' logits of the folder with those of our model of the checkpoint."""
    assert trained.export is not None, "the run has exported nothing"
    last = trained.iterations[-1]
    found: dict[str, Tensor] = {}
    for file in sorted(trained.export.glob("*.safetensors")):
        found |= load_file(file)
    dtype = torch.bfloat16 if trained.config.training.bf16 else torch.float32
    lora = trained.config.lora
    saved = states(trained.checkpoints[last]).master
    expected = merged(saved, lora)
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            where = "the checkpoint" if name in found else "the exported folder"
            yield Row(EXPORT, "weight", math.inf, 0.0, last, name, f"{where} does not have it")
            continue
        bound = 0.0
        if lora.lora_rank and _adapter(name, "A") in saved:
            bound = MERGED if dtype == torch.float32 else MERGED_BF16
        got, want = found[name], expected[name].to(dtype)
        same = got.dtype == dtype and torch.equal(got, want)
        yield Row(
            EXPORT, "weight", 0.0 if same else distance(got, want) or math.inf, bound, last, name
        )
    yield from _config_rows(trained, trained.export, materials)
    yield from _logit_rows(trained, trained.export, found, materials)


def merged(saved: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights of a checkpoint with its low-rank additions in them: W + alpha / rank B A.

    Those that have one are in fp64: a run in fp16 keeps frozen weights in fp16, and exports
    fp32."""
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
    """The configuration says of the model what transformers' documentation says that its fields
    mean, and for the rest is that of the folder with which the run began."""
    file = exported / "config.json"
    if not file.exists():
        yield Row(EXPORT, "config.json", 1.0, 0.0, note="there is none")
        return
    found = json.loads(file.read_text())
    before = json.loads((materials.model / "config.json").read_text())
    expected = {name: before.get(name) for name in (found.keys() | before.keys()) - IGNORED}
    for name, value in {**expected, **_documented(trained, materials)}.items():
        same = found.get(name) == value
        note = "" if same else f"{name}: {found.get(name)} instead of {value}"
        yield Row(EXPORT, "config.json", float(not same), 0.0, note=note)


def _documented(trained: Trained, materials: Materials) -> dict[str, object]:
    """Fields of config.json by their documentation in transformers, not by our writer."""
    model = trained.config.model
    gemma = model.model_type.startswith("gemma")
    return {
        **{name: getattr(model, name) for name in ALIKE},
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
    """transformers reads configuration and weights by itself. Raises NotComparedError without
    it."""
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
    """Text as long as a sample."""
    texts = [text for documents in materials.documents.values() for text in documents]
    texts += [talk.ids for talk in materials.talks]
    ids = [token for text in texts for token in text]
    # Where a built-in template makes the tokens, they are not known.
    ids = ids or list(range(materials.vocab_size))
    return torch.tensor(ids[:length])
