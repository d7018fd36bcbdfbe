"""The places of routers and experts in a ``torch_dist`` folder.

    decoder.layers.pre_mlp_layernorm.weight                  [layers, hidden]
    decoder.layers.mlp.router.weight                         [layers, experts, hidden]
    decoder.layers.mlp.experts.experts.linear_fc1.weight     [layers, experts, 2 inner, hidden]
    decoder.layers.mlp.experts.experts.linear_fc2.weight     [layers, experts, hidden, inner]

Megatron-Core's kinds of experts (SequentialMLP, TEGroupedMLP, GroupedMLP) all save them like this.
Where some layers are dense, each layer has tensors of its own (``decoder.layers.7.mlp...``), and
experts keep their dimension. With ``singleton_local_shards`` each expert and each half of
``linear_fc1`` is a tensor (``mlp.experts.experts.3.linear_fc1.weight_w``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.expert_args import has_experts_everywhere
from megatron_llama.converter.megatron.names import BLOCKS, LOCAL, TE
from megatron_llama.converter.tensor_map import TensorMap
from megatron_llama.converter.torch_dist.names import HALVES, LAYERS, StoredWeight
from megatron_llama.engine.plan.specs import HFSlice
from megatron_llama.model.plan.experts import DOWN, GATE_UP, ROUTER, is_sparse

NORM = "post_attention_layernorm.weight"
OWNER = "mlp.experts.experts."
MATRICES: Mapping[str, str] = MappingProxyType({GATE_UP: "linear_fc1", DOWN: "linear_fc2"})
"""Parameters of all experts of a block, by our names, and the module of one expert."""


def is_expert_part(leaf: str) -> bool:
    """Whether a parameter of a block, by our name, is a router or holds experts."""
    return leaf == ROUTER or leaf in MATRICES


def possible_places(
    layer: int, leaf: str, map: TensorMap, model: ModelConfig
) -> Iterator[tuple[StoredWeight, ...]]:
    """Yield the possible places of a router, or of all experts' matrices of one kind in a block,
    each one or several tensors."""
    layers = model.num_hidden_layers
    fronts = ((LAYERS, (layer,), (layers,)), (f"{LAYERS}{layer}.", (), ()))
    if leaf == ROUTER:
        for front, index, whole in fronts:
            yield (StoredWeight(f"{front}mlp.router.weight", index, whole, map),)
        return
    module = MATRICES[leaf]
    matrices = _by_expert(map, model.num_experts)
    for front, index, whole in fronts:
        key = f"{front}{OWNER}{module}.weight"
        yield tuple(
            StoredWeight(key, (*index, expert), (*whole, len(matrices)), matrix)
            for expert, matrix in enumerate(matrices)
        )
    for front, index, whole in fronts:
        keys = [f"{front}{OWNER}{expert}.{module}.weight" for expert in range(len(matrices))]
        named = zip(keys, matrices, strict=True)
        if leaf == DOWN:
            yield tuple(StoredWeight(key, index, whole, matrix) for key, matrix in named)
        else:
            yield tuple(
                StoredWeight(key + end, index, whole, matrix.one_slice(half))
                for key, matrix in named
                for half, end in enumerate(HALVES)
            )


def _by_expert(map: TensorMap, experts: int) -> list[TensorMap]:
    """Return the map of each expert's matrix."""
    rows = map.shape[0] // experts
    slices: list[list[HFSlice]] = [[] for _ in range(experts)]
    for piece in map.slices:
        expert, row = divmod(piece.row, rows)
        slices[expert].append(replace(piece, row=row))
    return [TensorMap((rows, *map.shape[1:]), tuple(pieces)) for pieces in slices]


def written_places(
    layer: int, leaf: str, map: TensorMap, model: ModelConfig
) -> Iterator[StoredWeight]:
    """Yield the places at which a parameter of a block is written, whether it belongs to experts or
    not, as TransformerEngine's modules have them."""
    everywhere = has_experts_everywhere(model)
    if is_expert_part(leaf):
        stacked, single, *_ = possible_places(layer, leaf, map, model)
        yield from stacked if everywhere else single
        return
    # Only the norm of a dense MLP belongs to its first matrix.
    names = BLOCKS[LOCAL if leaf == NORM and is_sparse(model, layer) else TE]
    if everywhere:
        yield StoredWeight(LAYERS + names[leaf], (layer,), (model.num_hidden_layers,), map)
    else:
        yield StoredWeight(f"{LAYERS}{layer}.{names[leaf]}", (), (), map)


def scaling_states(model: ModelConfig, attention: tuple[str, ...]) -> Iterator[str]:
    """Yield the names under which Megatron asks for the fp8 scaling of modules of layers.
    ``attention`` has those of a layer's attention."""
    layers = model.num_hidden_layers
    experts = model.num_experts
    everywhere = has_experts_everywhere(model)
    for layer in range(layers):
        sparse = is_sparse(model, layer)
        one = ("pre_mlp_layernorm",) if sparse else ("mlp.linear_fc1", "mlp.linear_fc2")
        for module in (*attention, *one):
            if everywhere:
                yield f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}"
            else:
                yield f"{LAYERS}{layer}.{module}._extra_state/shard_0_1"
        for module in MATRICES.values() if sparse else ():
            for expert in range(experts):
                if everywhere:
                    place = f"{LAYERS}{OWNER}{module}._extra_state/shard_{layer}.{expert}"
                    yield f"{place}_{layers}.{experts}"
                else:
                    place = f"{LAYERS}{layer}.{OWNER}{module}._extra_state/shard_{expert}"
                    yield f"{place}_{experts}"
