"""Whole parameters between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.shard.initial import require_same_options
from megatron_llama.engine.shard.placeholders import NOT_CHOSEN, ON_RANK_0, Placeholder
from megatron_llama.engine.shard.values import ModuleValues, named
from megatron_llama.engine.tensors import inner
from megatron_llama.errors import ConfigError, TrainingError, describe, listing

Only = str | nn.Module | Iterable[str | nn.Module]
"""Which parameters and buffers are meant: names, patterns of names, modules."""
WHERE = "engine.gathered"


@dataclass(frozen=True)
class Chosen:
    """Names of what is gathered, and what the module holds in place of everything else."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    placeholders: Mapping[str, Placeholder]
    """For parameters that are not whole on this rank."""
    device: torch.device
    """Where the copies are; the meta device on a rank that gets none."""


@contextmanager
def gathered(
    values: ModuleValues,
    *,
    modify: bool = False,
    only: Only | None = None,
    to: torch.device | str | None = None,
    rank0: bool = False,
) -> Iterator[None]:
    """Have parameters whole in the module, in memory of their own that is freed at the end, and
    placeholders in place of the others. Collective: all ranks give the same arguments.

    All parameters are whole, or those that ``only`` says; on every rank, or with ``rank0`` on rank
    0 alone; on the engine's device or on ``to``. They are copies, in the compute dtype. With
    ``modify`` they are in the dtype of the masters, and at the end rank 0's parameters and buffers,
    as far as they are chosen, become those of all ranks; the state of the optimizer stays. They
    require no gradient; what ``requires_grad`` is set to inside, or ``requires_grad_`` is called
    for, is kept for the next pass, as between steps. Raises ConfigError, on all ranks, for
    arguments that fit nothing or differ, and TrainingError where a parameter has no values or has
    been changed without ``modify``."""
    values.engine.settle()
    chosen = _choose(values, modify, only, to, rank0=rank0)
    names = (*chosen.parameters, *chosen.buffers)
    outside = {name: getattr(*next(values.places(name))) for name in chosen.parameters}
    if modify:
        with (
            values.changing(
                chosen.parameters,
                chosen.buffers,
                names,
                device=chosen.device,
                placeholders=chosen.placeholders,
            ),
            _noted(values),
            _requests_kept(values, outside),
        ):
            yield
        values.engine.publish()
        return
    values.require_initialized(names)
    whole = values.whole(chosen.parameters, computes=True, device=chosen.device)
    parameters = {name: p for name, p in whole.items() if name not in chosen.placeholders}
    before = _digests(parameters.values())
    held = {**parameters, **chosen.placeholders}
    with values.installed(held):
        with _noted(values), _requests_kept(values, outside):
            yield
        changed = {
            name
            for name, parameter in held.items()
            if getattr(*next(values.places(name))) is not parameter
        }
    changed.update(
        name
        for name, old, new in zip(parameters, before, _digests(parameters.values()), strict=True)
        if old != new
    )
    with raise_on_all_ranks(values.engine.mesh.world):
        if changed:
            raise TrainingError(
                WHERE,
                got=f"a change of {named(changed)}",
                expected="parameters as they were, because changes here are lost",
                do="write engine.gathered(modify=True), which keeps rank 0's",
            )


def _choose(
    values: ModuleValues,
    modify: bool,
    only: Only | None,
    to: torch.device | str | None,
    *,
    rank0: bool,
) -> Chosen:
    """Return what the arguments of ``gathered`` mean. Raises ConfigError on all ranks. Collective,
    because ranks that gathered different buckets would take each other's for their own."""
    mesh = values.engine.mesh
    device = mesh.device if to is None else torch.device(to)
    with raise_on_all_ranks(mesh.world):
        parameters, buffers = _matches(values, only)
        if device.type == "meta":
            raise ConfigError(
                f"{WHERE}(to=)", got=device, expected="a device with memory", do='give to="cpu"'
            )
    options = {
        "only": "everything" if only is None else ", ".join((*parameters, *buffers)),
        "to": device.type,
        "modify": modify,
        "rank0": rank0,
    }
    require_same_options(options, mesh.world, WHERE)
    placeholders = values.placeholders(values.aliases.keys() - parameters, NOT_CHOSEN)
    if rank0 and mesh.dp.rank:
        placeholders |= values.placeholders(parameters, ON_RANK_0)
        device = torch.device("meta")
    return Chosen(parameters, buffers, placeholders, device)


def _matches(values: ModuleValues, only: Only | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parameters and of the buffers that ``only`` means. Raises ConfigError
    for what means nothing in this model."""
    buffers = values.buffers()
    if only is None:
        return tuple(values.aliases), tuple(buffers)
    meant: set[str] = set()
    problems = []
    for choice in [only] if isinstance(only, str | nn.Module) else list(only):
        if isinstance(choice, nn.Module):
            modules = set(choice.modules())
            # A shared buffer is listed with one of its modules only.
            own = {id(buffer) for buffer in choice.buffers()}
            matched = {
                name
                for name in values.aliases
                if any(module in modules for module, _ in values.places(name))
            } | {name for name, (_, _, buffer) in buffers.items() if id(buffer) in own}
            text = f"{type(choice).__name__}(...)"
        elif isinstance(choice, str):
            matched = {
                name
                for name, aliases in values.aliases.items()
                if any(fnmatchcase(alias, choice) for alias in aliases)
            } | {name for name in buffers if fnmatchcase(name, choice)}
            text = repr(choice)
        else:
            raise TypeError(
                f"{WHERE}(only=): got {type(choice).__name__}, expected names or patterns of "
                'parameters, or modules; write only="lm_head.weight" or only=model.lm_head'
            )
        if not matched and (left_out := _ignored(values, choice)):
            problems.append(
                describe(
                    "only",
                    got=f"{text}, which shard(ignored=) has left as it is",
                    expected="parameters or buffers of the engine",
                    do=f"read {named(left_out)} in the module: it is whole there at any time",
                )
            )
        elif not matched:
            first = next(iter(values.aliases))
            problems.append(
                describe(
                    "only",
                    got=f"{text}, which is no parameter or buffer of the model",
                    expected="names or patterns of parameters, or modules of the model",
                    do=f"mend it (a name of this model is {first})",
                )
            )
        meant |= matched
    if problems:
        raise ConfigError(listing(f"{WHERE}:", problems))
    return (
        tuple(name for name in values.aliases if name in meant),
        tuple(name for name in buffers if name in meant),
    )


def _ignored(values: ModuleValues, choice: str | nn.Module) -> list[str]:
    """Return the ignored parameters that a choice means."""
    own = set(choice.parameters()) if isinstance(choice, nn.Module) else set()
    return [
        name
        for name, parameter in values.ignored.items()
        if (fnmatchcase(name, choice) if isinstance(choice, str) else parameter in own)
    ]


@contextmanager
def _requests_kept(values: ModuleValues, outside: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Tell the placeholders that the module holds ``outside``, by name, to what ``requires_grad``
    is set of the parameters in their places."""
    inside = [
        (parameter, outside[name])
        for name in outside
        if not isinstance(parameter := getattr(*next(values.places(name))), Placeholder)
    ]
    held = {id(parameter): placeholder for parameter, placeholder in inside}
    kinds = {kind: _telling(kind, held) for kind in {type(parameter) for parameter, _ in inside}}
    before = [(parameter, type(parameter)) for parameter, _ in inside]
    for parameter, kind in before:
        parameter.__class__ = kinds[kind]
    try:
        yield
    finally:
        for parameter, kind in before:
            parameter.__class__ = kind


def _telling(kind: type[Tensor], placeholders: Mapping[int, nn.Parameter]) -> type[Tensor]:
    """Return a class of parameters of this ``kind`` that tell their placeholders, by id, to what
    ``requires_grad`` is set. It need not change for that: they require no gradient before. Copies
    and pickles are of the ``kind``."""

    class Telling(kind):  # type: ignore[valid-type, misc]
        @property
        def requires_grad(self) -> bool:
            return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

        @requires_grad.setter
        def requires_grad(self, trained: bool) -> None:
            placeholders[id(self)].requires_grad_(trained)
            Tensor.requires_grad.__set__(self, trained)  # type: ignore[attr-defined]

        def requires_grad_(self, requires_grad: bool = True) -> Tensor:
            self.requires_grad = requires_grad
            return self

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            with self._of_kind():
                return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            with self._of_kind():
                return self.__reduce_ex__(protocol)

        @contextmanager
        def _of_kind(self) -> Iterator[None]:
            self.__class__ = kind  # type: ignore[assignment]
            try:
                yield
            finally:
                self.__class__ = Telling

    Telling.__name__ = Telling.__qualname__ = kind.__name__
    return Telling


def _digests(parameters: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    """Return what a change of a parameter changes: its version, its address, and the sum of its
    memory."""
    # The version alone is not enough: ``parameter.data.clamp_(...)`` leaves it as it is.
    listed = [inner(parameter) for parameter in parameters]
    sums = [sum_of_words(parameter.detach()) for parameter in listed]
    read = torch.stack(sums).tolist() if sums else []  # the host waits once
    return [
        (parameter._version, parameter.data_ptr(), total)
        for parameter, total in zip(listed, read, strict=True)
    ]


def sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's memory as integers of 64 bits."""
    memory = tensor.reshape(-1).view(torch.uint8)
    if memory.storage_offset() % 8:
        memory = memory.clone()  # somebody has put a part of another tensor here
    # A sum of shorter integers would first make a copy of 64 bits for each.
    whole_words = len(memory) // 8 * 8
    return memory[:whole_words].view(torch.int64).sum() + memory[whole_words:].sum()


@contextmanager
def _noted(values: ModuleValues) -> Iterator[None]:
    """Let ``model.state_dict()`` know that the parameters are whole."""
    values.are_whole = True
    try:
        yield
    finally:
        values.are_whole = False
