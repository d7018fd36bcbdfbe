"""Whether the HuggingFace folder of a run is the model that it has trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_llama.config.schema import LoraConfig
from megatron_llama.conversion.verify.logits import TOLERANCE, StreamedModel, logit_deviation
from megatron_llama.conversion.verify.reference import TransformersModel, obstacle
from megatron_llama.plans.params import Rectangle
from megatron_llama.prove.compare import Row, distance
from megatron_llama.prove.materials import Materials
from megatron_llama.prove.reference import NotComparedError, last_line
from megatron_llama.prove.run import Trained, states

EXPORT = "export"
MERGED = 1e-6
"""An addition of low rank is merged in a precision that is the writer's."""
MERGED_BF16 = 2.0**-8
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
    yield from _config_rows(trained.export, materials.model)
    yield from _logit_rows(trained, trained.export, found, materials)


def merged(saved: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights of a checkpoint with its low-rank additions in them: W + alpha / rank B A."""
    weights = {name: tensor for name, tensor in saved.items() if ".lora_" not in name}
    for name, weight in weights.items():
        first, second = _adapter(name, "A"), _adapter(name, "B")
        if first in saved:
            addition = saved[second].double() @ saved[first].double()
            whole = weight.double() + lora.lora_alpha / lora.lora_rank * addition
            weights[name] = whole.to(weight.dtype)
    return weights


def _adapter(name: str, which: str) -> str:
    return f"{name.removesuffix('.weight')}.lora_{which}.weight"


def _config_rows(exported: Path, begun_with: Path) -> Iterator[Row]:
    """The configuration is that of the folder with which the run began."""
    found, expected = (
        json.loads((folder / "config.json").read_text()) for folder in (exported, begun_with)
    )
    for name in sorted((found.keys() | expected.keys()) - IGNORED):
        same = found.get(name) == expected.get(name)
        note = "" if same else f"{name}: {found.get(name)} instead of {expected.get(name)}"
        yield Row(EXPORT, "config.json", float(not same), 0.0, note=note)


def _logit_rows(
    trained: Trained, exported: Path, weights: Mapping[str, Tensor], materials: Materials
) -> Iterator[Row]:
    """transformers reads configuration and weights by itself. Without it nothing is compared."""
    model = trained.config.model
    if obstacle(model) is not None:
        return

    def source(rectangle: Rectangle, out: Tensor) -> None:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        out.copy_(weights[rectangle.name][place])

    tokens = _tokens(materials, trained.config.training.seq_length)
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
