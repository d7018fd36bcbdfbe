"""Whole values of a sharded module: its parameters in and out of this rank's shards, its buffers,
and which of both have no values yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.engine.comm.collectives import all_gather
from megatron_llama.engine.comm.object_collectives import on_rank0, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.plan.buckets import ALIGN, PlacedParam
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.names import ParameterNames, clean_name
from megatron_llama.engine.shard.placeholders import Absence, Placeholder
from megatron_llama.errors import ConfigError, TrainingError, counted, describe, listing

BROADCAST_NUMEL = 2**24
"""Most elements of one broadcast: what a rank without the values needs as a buffer."""
LISTED = 5
"""Most names that a message lists."""
MASTER = "master"
"""The weight itself, among the tensors of a shard; the others are the update rule's state."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of AdamW for every trained parameter, by its name in the engine and in torch.optim."""
NO_PLACEHOLDERS: Mapping[str, Placeholder] = MappingProxyType({})
NO_PARAMETERS: Mapping[str, nn.Parameter] = MappingProxyType({})


class ModuleValues:
    """The parameters and buffers of a module whose parameters an engine has.

    It is made while the module still has its own parameters. All names are clean, as those that
    the engine uses."""

    def __init__(
        self,
        engine: OverlappedDistributedOptimizer,
        model: nn.Module,
        names: ParameterNames,
        holders: Holders,
    ) -> None:
        self.engine = engine
        self.model = model
        self.plan = engine.bucket_plan
        self.aliases = {own[0]: own for own in names.values()}
        """All names of each parameter: a shared one has several."""
        self.ignored: Mapping[str, nn.Parameter] = NO_PARAMETERS
        """The parameters that the engine leaves as they are, under all of their names."""
        self.uninitialized: set[str] = set()
        """Names of parameters and buffers that have no values."""
        self.bucket_of = {
            placed.spec.name: bucket.index
            for bucket in self.plan.buckets
            for placed in bucket.placements
        }
        """The bucket of each parameter."""
        # One for each parameter at most, because a shard is contiguous.
        self._segments = {
            segment.spec.name: segment
            for bucket in self.plan.buckets
            for segment in self.plan.segments(bucket.index, engine.mesh.dp_shard.rank)
        }
        self.layouts = holders.layouts
        self._shapes = {
            placed.spec.name: self.layouts.shape(placed.spec.name, placed.spec.shape)
            for bucket in self.plan.buckets
            for placed in bucket.placements
        }
        self._attributes = holders.attributes
        self._places = holders.places
        self.are_whole = False
        """Whether the module has whole parameters at the moment."""
        self.require_unwritten: Callable[[], None] | None = None
        """Raises TrainingError if pieces of masters that a reader got have been written."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter computes."""
        return self.engine.parameters.shards[self.bucket_of[name]].dtype

    def require_initialized(self, names: Collection[str] | None = None) -> None:
        """Raise TrainingError while something has no values, of everything or of ``names``."""
        missing = self.uninitialized if names is None else self.uninitialized.intersection(names)
        if missing:
            raise TrainingError(
                describe(
                    "model",
                    got=f"no values of {named(missing)} (on the meta device in shard())",
                    expected="values before the first forward pass",
                    do="call engine.initialize() or engine.load_state_dict(...), "
                    "or set them inside engine.gathered(modify=True)",
                )
            )

    def require_usable(self) -> None:
        """Raise TrainingError while something has no values, or the masters have others than the
        weights that compute."""
        self.require_initialized()
        if self.require_unwritten is not None:
            self.require_unwritten()
            # Once: pieces are for the time between two passes.
            self.require_unwritten = None

    # Parameters in the shards. No other thread may read or write these meanwhile: call
    # ``engine.settle()`` first. Written values count after ``engine.publish()``.

    def tensors(self, bucket: int) -> dict[str, Tensor]:
        """Return the master and the state of a bucket's elements, live: flat tensors of one shard,
        wherever the update rule keeps them. A frozen bucket has no state. Moments in 8 bits have
        some tensors with a number for each block of ALIGN elements."""
        state = self.state(bucket)
        of_elements = {name: tensor for name, tensor in state.items() if tensor.dim()}
        return {MASTER: self.engine.masters[bucket], **of_elements}

    def state(self, bucket: int) -> dict[str, Tensor]:
        """Return the state of a bucket, live: flat tensors of one shard, and numbers, of no dim."""
        if not self.plan.buckets[bucket].kind.trainable:
            return {}
        return self.engine.rules.by_bucket[bucket].state(bucket)

    def state_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the state of a parameter."""
        return tuple(self.state(self.bucket_of[name]))

    def write(self, name: str, what: str, values: Tensor, start: int = 0) -> None:
        """Copy ``values``, elements of the flattened parameter from ``start`` on, to where they
        lie in this rank's shard; what lies in other shards is left out."""
        segment = self._segments.get(name)
        if segment is None:
            return
        low = max(segment.in_param, start)
        high = min(segment.in_param + segment.length, start + values.numel())
        if low < high:
            shard = self.tensors(self.bucket_of[name])[what]
            at = segment.in_shard + low - segment.in_param
            shard[at : at + high - low].copy_(values[low - start : high - start])

    def write_blocks(self, name: str, what: str, values: Tensor) -> None:
        """Copy the numbers of all blocks of a parameter to where they lie in this rank's shard."""
        segment = self._segments.get(name)
        if segment is not None:
            # A shard is cut at multiples of ALIGN, and so begins with a block.
            shard = self.tensors(self.bucket_of[name])[what]
            at, first = segment.in_shard // ALIGN, segment.in_param // ALIGN
            count = -(-segment.length // ALIGN)
            shard[at : at + count].copy_(values[first : first + count])

    def of_blocks(self, bucket: int, what: str) -> bool:
        """Whether a tensor has a number for each block, and not for each element."""
        return len(self.tensors(bucket)[what]) < len(self.engine.masters[bucket])

    def state_shape(self, name: str, what: str) -> tuple[int, ...]:
        """Return the shape of a parameter's state."""
        shape = self.shape(name)
        return (-(-prod(shape) // ALIGN),) if self.of_blocks(self.bucket_of[name], what) else shape

    def gather(self, bucket: int, what: str = MASTER) -> Tensor:
        """Return the whole bucket, flat, on the device, in the dtype of the shard. Collective over
        the ranks that share the bucket."""
        shard = self.tensors(bucket)[what].to(self.engine.mesh.device)
        numel = len(shard) * self.plan.shards
        whole = torch.empty(numel, dtype=shard.dtype, device=shard.device)
        all_gather(whole, shard, self.engine.mesh.dp_gather).wait()
        return whole

    def parameters(self, bucket: int, whole: Tensor) -> Iterator[tuple[PlacedParam, Tensor]]:
        """Yield each parameter of a whole bucket as a view of its shape; numbers of blocks flat."""
        of_blocks = len(whole) < self.plan.buckets[bucket].numel
        for placed in self.plan.buckets[bucket].placements:
            if of_blocks:
                yield placed, whole[placed.start // ALIGN : -(-placed.stop // ALIGN)]
            else:
                yield placed, whole[placed.start : placed.stop].view(placed.spec.shape)

    def broadcast(self, tensor: Tensor, axis: Axis | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield rank 0's values of a tensor as (first element, flat piece on the device). On other
        ranks the tensor only says shape and dtype. ``axis`` is by default that of all ranks.
        Collective, piece by piece."""
        axis = axis or self.engine.mesh.dp
        device = self.engine.mesh.device
        flat = tensor.detach().reshape(-1)
        for start in range(0, tensor.numel(), BROADCAST_NUMEL):
            if axis.rank == 0:
                values = flat[start : start + BROADCAST_NUMEL].to(device)
            else:
                stop = min(start + BROADCAST_NUMEL, tensor.numel())
                values = torch.empty(stop - start, dtype=tensor.dtype, device=device)
            if axis.size > 1:
                # As bytes: gloo does not know every dtype. And ``.data``: autograd would take the
                # broadcast for a change of the parameter.
                dist.broadcast(values.data.view(torch.uint8), group=axis.communicator, group_src=0)
            yield start, values

    def _axis(self, name: str) -> Axis:
        """Return the ranks that get their values of a parameter from the first of them."""
        mesh = self.engine.mesh
        alike = mesh.tp.size > 1 and name in self.aliases and not self.layouts.is_cut(name)
        return mesh.world if alike else mesh.dp

    # Parameters and buffers in the module

    def places(self, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Yield (module, attribute) of every place of a parameter."""
        # A tied weight is in several modules, and all of them have to get the same tensor.
        for place in self._places[name]:
            yield place.module, place.leaf

    def buffers(self) -> dict[str, tuple[nn.Module, str, Tensor]]:
        """Return (module, attribute, buffer) by name, each buffer once."""
        buffers = {}
        for name, buffer in self.model.named_buffers():
            owner, _, leaf = name.rpartition(".")
            buffers[clean_name(name)] = (self.model.get_submodule(owner), leaf, buffer)
        return buffers

    def whole(
        self, names: Iterable[str], *, computes: bool = False, device: torch.device | None = None
    ) -> dict[str, nn.Parameter]:
        """Return whole parameters in memory of their own, in the dtype of the masters or with
        ``computes`` in that in which each computes, on the engine's device or on ``device``. Those
        without values are filled as by ``forget``. Beside the result one whole bucket is in memory.
        Collective: a rank that needs none of the values gives the meta device.

        They require no gradient: what a backward pass left in their ``.grad`` would be lost."""
        wanted = set(names)
        parameters: dict[str, nn.Parameter] = {}
        # A user may be in inference mode, whose tensors have no version that tells of changes.
        with torch.inference_mode(mode=False), torch.no_grad():
            for bucket in sorted({self.bucket_of[name] for name in wanted}):
                for placed, view in self.parameters(bucket, self.gather(bucket)):
                    if placed.spec.name in wanted:
                        name = placed.spec.name
                        dtype = self.dtype(name) if computes else view.dtype
                        value = view.to(device or view.device, dtype, copy=True)
                        parameter = self.layouts.parameter(name, value, requires_grad=False)
                        vars(parameter).update(self._attributes[name])
                        parameters[name] = parameter
                # Before the next gather: it is of this bucket's memory.
                del view
        for name in wanted & self.uninitialized:
            forget(parameters[name])
        return {name: parameters[name] for name in self.aliases if name in wanted}

    def placeholders(self, names: Iterable[str], absence: Absence) -> dict[str, Placeholder]:
        """Return placeholders of parameters that are never read."""
        made = {}
        for name in names:
            made[name] = Placeholder(
                name,
                self.shape(name),
                self.dtype(name),
                self.engine.mesh.device,
                _never,
                requires_grad=self.plan.buckets[self.bucket_of[name]].kind.trainable,
                absence=absence,
            )
            vars(made[name]).update(self._attributes[name])
        return made

    @contextmanager
    def installed(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Put these parameters into the module for a while, each under all of its names, and then
        put back what was there."""
        before = [
            (*place, place[0]._parameters[place[1]]) for n in parameters for place in self.places(n)
        ]
        try:
            for name, parameter in parameters.items():
                for module, leaf in self.places(name):
                    module._parameters[leaf] = parameter
            yield
        finally:
            for module, leaf, old in before:
                module._parameters[leaf] = old

    @contextmanager
    def changing(
        self,
        names: Collection[str],
        buffers: Collection[str],
        keep: Collection[str],
        *,
        device: torch.device | None = None,
        placeholders: Mapping[str, Placeholder] = NO_PLACEHOLDERS,
    ) -> Iterator[None]:
        """Have these parameters whole in the module, in the dtype of the masters, on ``device``. At
        the end the shards get rank 0's values of those parameters that are among ``keep``, and all
        ranks get rank 0's values of those buffers. Collective.

        ``placeholders`` are in the module as well, and on other ranks than 0 also in the place of
        whole parameters, which are on the meta device there.

        Afterwards ``uninitialized`` has no longer what rank 0 has given values. If the block
        raises, nothing is changed. Raises ConfigError, on all ranks, where a tensor of another
        shape has been put into the module."""
        parameters = self.whole(names, device=device)
        places = {name: place for name, place in self.buffers().items() if name in buffers}
        versions: dict[str, int] = {}
        for name in self.uninitialized.intersection(names, keep):
            versions[name] = parameters[name]._version
        for name in self.uninitialized.intersection(places, keep):
            versions[name] = forget(places[name][2])
        with self.installed({**parameters, **placeholders}):
            yield
            # Not the installed tensors: the caller may have put others into their places.
            now = {
                name: parameter if name in placeholders else getattr(*next(self.places(name)))
                for name, parameter in parameters.items()
            }
        now |= {name: getattr(module, leaf) for name, (module, leaf, _) in places.items()}
        own: dict[str, Tensor] = {
            **parameters,
            **{name: place[2] for name, place in places.items()},
        }
        for module, leaf, buffer in places.values():
            module._buffers[leaf] = buffer
        with raise_on_all_ranks(self.engine.mesh.world):
            problems = [
                describe(
                    name,
                    got=f"a value of {shape}",
                    expected=f"{tuple(tensor.shape)}",
                    do="keep the shape",
                )
                for name, tensor in own.items()
                if (shape := tuple(getattr(now[name], "shape", ()))) != tensor.shape
            ]
            problems += [
                describe(
                    name,
                    got="a DTensor of another layout",
                    expected="a plain tensor, or a DTensor as the one that was there",
                    do="change the values in place",
                )
                for name in own
                if not self.layouts.fits(name, now[name])
            ]
            if problems:
                raise ConfigError(listing("parameters that were changed:", problems))
        now = {name: self.layouts.part(name, value) for name, value in now.items()}
        # Only rank 0's values count, so only it knows what has none.
        unset_names = on_rank0(
            lambda: [name for name, version in versions.items() if unset(now[name], version)],
            self.engine.mesh.world,
        )
        with torch.no_grad():
            for name, tensor in own.items():
                if name not in keep or name in unset_names:
                    continue
                value = now[name].to(tensor.dtype)
                for start, piece in self.broadcast(value, self._axis(name)):
                    if name in parameters:
                        self.write(name, MASTER, piece, start)
                    else:
                        tensor.view(-1)[start : start + len(piece)].copy_(piece)
                self.uninitialized.discard(name)


def named(names: Iterable[str]) -> str:
    """Return the first names as a message lists them, and how many there are."""
    shown = sorted(names)
    more = len(shown) - LISTED
    return ", ".join(shown[:LISTED]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def _never(placeholder: Placeholder) -> None:
    """Return nothing: there are no values, whatever runs."""


def unset(tensor: Tensor, version: int) -> bool:
    """Whether ``forget`` has filled a tensor and it has got no values since. ``version`` is the
    tensor's autograd version at that time."""
    if tensor.is_floating_point() or tensor.is_complex():
        # Not the version: a write through ``.data`` does not change it.
        return bool(tensor.isnan().any())
    return tensor._version == version


def forget(tensor: Tensor) -> int:
    """Fill a tensor so that ``unset`` recognises it. Returns its version."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.zero_()
    return tensor._version
