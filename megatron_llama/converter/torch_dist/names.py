"""The places of a model's tensors in a ``torch_dist`` folder.

The keys are those of Megatron-Core's modules, as in ``converter.megatron``. A layer's tensors are
stacked in dimension 0 (``decoder.layers.mlp.linear_fc2.weight``), or each is on its own where
layers may differ (``decoder.layers.7.mlp.linear_fc2.weight``). The two halves of ``linear_fc1`` may
have keys of their own (``weight_w``: gate, ``weight_v``: up). A tensor is whole, whatever the
layout of the run: the gate's rows stand before all of the up projection's, the rows of q, k and v
are those of each key/value head in turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.index import StoredTensor
from megatron_llama.checkpoint.model_folders.model_fields import MATCHING_FILES, PLAIN_MODELS
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.names import (
    BLOCKS,
    IGNORED,
    LOCAL,
    TE,
    file_tensors,
    partition_of,
    their_name,
)
from megatron_llama.converter.tensor_map import TensorMap
from megatron_llama.engine.plan.specs import HFSlice, Rectangle
from megatron_llama.errors import describe

LAYERS = "decoder.layers."
EMBEDDING_KEY = "embedding.word_embeddings.weight"
HEAD_KEY = "output_layer.weight"
HALVES = ("_w", "_v")
"""Endings of the keys of ``linear_fc1``'s halves: the gate, the up projection."""
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..*")
"""Keys of the optimizer's state."""
OTHER_PARTS: Mapping[str, str] = MappingProxyType(
    {
        r".*\.shared_experts\..*": "an expert of all tokens",
        r".*\.router\.(expert_bias|bias)": "a router with biases",
        r".*\.(experts|shared_experts|router|local_experts)\..*": "a mixture of experts",
        r".*\.(linear_(q|kv|qkv)_(down|up)_proj|kv_layernorm|linear_q_proj)\..*": (
            "multi-head latent attention"
        ),
        r".*(_quantizer\b|_amax\b|weight_scale|_scale_inv|qweight).*": "a quantised model",
        r"mtp\..*": "multi-token prediction",
        r".*\.mixer\..*": "a Mamba model",
        r".*(lora|adapter).*": "adapters",
    }
)
"""Parts of models that cannot be converted, by their keys."""


@dataclass(frozen=True)
class StoredWeight:
    """The place of a tensor of ours, or of a half of one, in a folder."""

    key: str
    index: tuple[int, ...]
    """Its index in the first dimensions of a stacked tensor: layer, expert."""
    stacked: tuple[int, ...]
    """The sizes of these dimensions."""
    map: TensorMap
    """The HuggingFace rows in its rows."""


def find_weights(model: ModelConfig, container: Container) -> tuple[StoredWeight, ...]:
    """Return the places of the model's tensors; the model's vocabulary has the stored padding.
    Raises CheckpointError with every tensor that is missing, of another shape or of another model,
    and with all problems that keep the tensors from being read."""
    tensors = container.tensors
    weights = list[StoredWeight]()
    problems = list[str]()
    for own, map in _whole_maps(model).items():
        candidates = list(_candidates(own, map, model))
        stored = next(
            (places for places in candidates if all(p.key in tensors for p in places)), ()
        )
        weights += stored
        if not stored:
            names = " or ".join(dict.fromkeys(p.key for places in candidates for p in places[:1]))
            expected = f"{names} with rows of shape {map.shape}"
            problems.append(
                describe(
                    f"{container.folder} {own}",
                    got="no tensor",
                    expected=expected,
                    do=MATCHING_FILES,
                )
            )
        for weight in stored:
            shape = (*weight.stacked, *weight.map.shape)
            if tensors[weight.key].shape != shape:
                got = f"shape {tensors[weight.key].shape}"
                where = f"{container.folder} {weight.key}"
                problems.append(describe(where, got=got, expected=shape, do=MATCHING_FILES))
    problems += _unknown(container, {weight.key for weight in weights})
    # A stacked tensor is listed for each layer.
    refuse(f"{container.folder} does not hold the model:", list(dict.fromkeys(problems)))
    container.require(dict.fromkeys(weight.key for weight in weights))
    return tuple(weights)


def written_weights(model: ModelConfig) -> Iterator[StoredWeight]:
    """Yield the places at which the model's tensors are written, with those of one layer after
    those of another."""
    layers = model.num_hidden_layers
    for own, map in _whole_maps(model).items():
        if not own.startswith("model.layers."):
            yield StoredWeight(their_name(own, TE, "megatron", tied=False), (), (), map)
            continue
        layer, leaf = _layer_and_leaf(own)
        if model.num_experts:
            from megatron_llama.converter.torch_dist import experts  # of few models

            yield from experts.written_places(layer, leaf, map, model)
        else:
            yield StoredWeight(LAYERS + BLOCKS[TE][leaf], (layer,), (layers,), map)


def _whole_maps(model: ModelConfig) -> dict[str, TensorMap]:
    """Return the map of each tensor of a model without parallelism, by our names."""
    partition = partition_of([model.num_hidden_layers], 1)
    return file_tensors(model, "megatron", partition, 0, tp=1, tp_rank=0, whole_head=False)


def _layer_and_leaf(own: str) -> tuple[int, str]:
    """Return the number of a block, and our name within it."""
    number, _, leaf = own.removeprefix("model.layers.").partition(".")
    return int(number), leaf


def model_keys(tensors: Iterable[str]) -> Iterator[str]:
    """Yield the names of the model's tensors: all but the optimizer's."""
    for name in tensors:
        if not OPTIMIZER.fullmatch(name) and not IGNORED.fullmatch(name.partition("/")[0]):
            yield name


def layer_count(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the number of layers that the tensors of a model show; 0 if they show none."""
    counts = {0}
    for name in model_keys(tensors):
        if name.startswith(LAYERS):
            number = name.removeprefix(LAYERS).partition(".")[0]
            counts.add(int(number) + 1 if number.isdecimal() else tensors[name].shape[0])
    return max(counts)


def _candidates(own: str, map: TensorMap, model: ModelConfig) -> Iterator[tuple[StoredWeight, ...]]:
    """Yield the possible places of a tensor of ours, each of one or several keys."""
    if not own.startswith("model.layers."):
        yield (StoredWeight(their_name(own, TE, "megatron", tied=False), (), (), map),)
        return
    layer, leaf = _layer_and_leaf(own)
    if model.num_experts:
        from megatron_llama.converter.torch_dist import experts  # of few models

        if experts.is_expert_part(leaf):
            yield from experts.possible_places(layer, leaf, map, model)
            return
    layers = model.num_hidden_layers
    for theirs in dict.fromkeys((BLOCKS[TE][leaf], BLOCKS[LOCAL][leaf])):
        single = f"{LAYERS}{layer}.{theirs}"
        for key, index, stacked in ((LAYERS + theirs, (layer,), (layers,)), (single, (), ())):
            yield (StoredWeight(key, index, stacked, map),)
            if "linear_fc1" in theirs and leaf.startswith("mlp."):
                halves = zip(HALVES, (0, 1), strict=True)
                yield tuple(
                    StoredWeight(key + end, index, stacked, map.one_slice(n)) for end, n in halves
                )


def _unknown(container: Container, known: set[str]) -> Iterator[str]:
    """Yield a line for each tensor that is no part of the model, a kind of model only once."""
    names = dict[str, str]()
    for name in sorted(model_keys(container.tensors)):
        if name in known:
            continue
        kind = next((part for key, part in OTHER_PARTS.items() if re.fullmatch(key, name)), name)
        names.setdefault(kind, name)
    for kind, name in names.items():
        got = "a tensor" if kind == name else kind
        yield describe(
            f"{container.folder} {name}", got=got, expected="none of this name", do=PLAIN_MODELS
        )


class Boxes(Protocol):
    """A reader of boxes of stored tensors."""

    def read(self, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` with the box of its size that begins at ``offset``."""
        ...


class StoredSource:
    """A WeightSource of the stored tensors, or of tensors beside them with a longer key."""

    def __init__(self, container: Boxes, weights: Iterable[StoredWeight], prefix: str = "") -> None:
        """Take the places of the weights. ``prefix`` stands before each key:
        ``optimizer.state.exp_avg.`` makes this the source of Adam's first moments. The tensors
        must have passed ``container.require``."""
        self._container = container
        self._prefix = prefix
        self._pieces = dict[str, list[tuple[StoredWeight, HFSlice]]]()
        for weight in weights:
            for piece in weight.map.slices:
                self._pieces.setdefault(piece.name, []).append((weight, piece))

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype). Raises
        CheckpointError."""
        row, *column = rectangle.offset
        rows = rectangle.size[0]
        for weight, piece in self._pieces[rectangle.name]:
            top = max(row, piece.hf_row)
            bottom = min(row + rows, piece.hf_row + piece.rows)
            if top >= bottom:
                continue
            target = out[top - row : bottom - row]
            # Tensors are split by rows alone: every piece has all columns.
            offset = (*weight.index, piece.row + top - piece.hf_row, *column)
            for _ in weight.index:
                target = target.unsqueeze(0)
            self._container.read(self._prefix + weight.key, offset, target)
