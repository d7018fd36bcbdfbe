"""The first values of a module's parameters and buffers.

Rank 0's values count, as in DDP; other ranks may have theirs on the meta device. Tensors on the
meta device on rank 0 too have no values: ``initialize.py`` makes them unit by unit, or a state dict
brings them. Until then a forward pass is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm.object_collectives import (
    all_gather_object,
    broadcast_object,
    raise_on_all_ranks,
)
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.names import ParameterNames, clean_name
from megatron_llama.engine.shard.values import MASTER, ModuleValues
from megatron_llama.errors import ConfigError, describe, listing

Described = tuple[str, tuple[int, ...], str, bool]
"""Name, shape, dtype, and whether it is trained."""


def require_same_model(
    model: nn.Module, axis: Axis, without: Collection[nn.Parameter] = ()
) -> None:
    """Raise ConfigError on all ranks unless the parameters and buffers of each rank have the names,
    shapes and dtypes of rank 0's, in the same order, and the same of them are trained; those in
    ``without`` may differ. Collective."""
    ids = set(map(id, without))
    own: list[Described] = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        if id(tensor) not in ids
    ]
    # Equal on all ranks as a rule: then a hash is all that travels.
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(all_gather_object(digest, axis))) == 1:
        return
    first = broadcast_object(own, axis)
    with raise_on_all_ranks(axis):
        if own != first:
            problems = list(_differences(own, first))
            raise ConfigError(
                listing("shard(model): the model differs from that of rank 0:", problems)
            )


def require_same_options(options: Mapping[str, object], axis: Axis, where: str = "shard") -> None:
    """Raise ConfigError on all ranks, with the names, unless each rank has given the same options
    to ``where``. Collective."""
    own = {name: str(value) for name, value in options.items()}
    problems = []
    by_rank = all_gather_object(own, axis)
    for name in dict.fromkeys(name for given in by_rank for name in given):
        values = [given.get(name, "nothing") for given in by_rank]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is not None:
            problems.append(
                describe(
                    name,
                    got=f"{values[rank]} on rank {rank}",
                    expected=f"{values[0]} as on rank 0",
                    do="give all ranks the same",
                )
            )
    if problems:
        raise ConfigError(listing(f"{where}:", problems))


def _differences(own: list[Described], first: list[Described]) -> Iterator[str]:
    do = "build the same model on all ranks"
    mine = {described[0]: described for described in own}
    theirs = {described[0]: described for described in first}
    for name in mine | theirs:
        if mine.get(name) != theirs.get(name):
            got = _in_words(mine.get(name))
            yield describe(clean_name(name), got=got, expected=_in_words(theirs.get(name)), do=do)
    if mine == theirs:
        yield f"got the parameters in another order; {do}"


def _in_words(described: Described | None) -> str:
    if described is None:
        return "nothing"
    _, shape, dtype, trained = described
    return f"{dtype} of {shape}{', trained' if trained else ', not trained'}"


def first_values(
    engine: OverlappedDistributedOptimizer,
    model: nn.Module,
    names: ParameterNames,
    holders: Holders,
) -> ModuleValues:
    """Fill the shards of all ranks with the values that the parameters of ``model`` have on rank 0,
    and the buffers with rank 0's; buffers move to the engine's device. Collective.

    What is on the meta device on rank 0 has no values; such buffers get memory on the device."""
    values = ModuleValues(engine, model, names, holders)
    buffers = {name: buffer for name, (_, _, buffer) in values.buffers().items()}
    without = [own[0] for parameter, own in names.items() if parameter.is_meta]
    without += [name for name, buffer in buffers.items() if buffer.is_meta]
    # Rank 0 decides: other ranks may be on the meta device only because its values count.
    values.uninitialized |= set(broadcast_object(without, engine.mesh.world))
    with torch.no_grad():
        for parameter, (name, *_) in names.items():
            if name not in values.uninitialized:
                for start, piece in values.broadcast(parameter):
                    values.write(name, MASTER, piece, start)
        # By buffer, so that one that is registered twice stays one.
        places: dict[Tensor, Tensor] = {}
        for name, buffer in buffers.items():
            place = buffer
            if buffer.device != engine.mesh.device or not buffer.is_contiguous():
                place = torch.empty(buffer.shape, dtype=buffer.dtype, device=engine.mesh.device)
            if name not in values.uninitialized:
                for start, piece in values.broadcast(buffer):
                    place.view(-1)[start : start + len(piece)].copy_(piece)
            places[buffer] = place
        for module in model.modules():
            for leaf, registered in module._buffers.items():
                if registered is not None:
                    module._buffers[leaf] = places[registered]
    engine.publish()
    return values
