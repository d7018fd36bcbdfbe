"""The optimizer's part of a state dict, and states that are loaded, in the form of ``state.py``.

Imported by the first state that is saved or loaded: a run that only trains needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.options import ADAM, MUON, UpdateOptions
from megatron_llama.engine.pieces import column_state, resume_rules, rule_progress
from megatron_llama.engine.rules.bias_correction import bias_corrections
from megatron_llama.engine.shard.moment_forms import blocks_of, dequantised, other_forms, quantised
from megatron_llama.engine.shard.names import clean_name
from megatron_llama.engine.shard.optimizer import ParameterGroup, require_valid
from megatron_llama.engine.shard.state import (
    MODEL,
    NO_FACTORS,
    OPTIMIZER,
    StateLayout,
    persistent_buffers,
    sharded_parameters,
    with_extra_state,
)
from megatron_llama.engine.shard.unused import is_divisible, numbers_by_parameter, write_numbers
from megatron_llama.engine.shard.values import MASTER, MOMENTS, ModuleValues
from megatron_llama.errors import CheckpointError, ConfigError, describe, listing

KEPT = frozenset(
    {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
)
"""What a group does not take from a loaded state: all else it takes, as in torch.optim. The last
four choose an implementation for the processes that run."""


def optimizer_state(
    values: ModuleValues,
    layout: StateLayout,
    made: Sequence[ParameterGroup],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the optimizer's part of a state. ``groups`` are those of the facade as they are now,
    with ``param_names``, ``made`` those that ``shard`` got. Collective."""
    values.engine.settle()
    factors = _recounted(values, groups)
    trained = values.engine.gradients.trainable
    names = dict.fromkeys(
        what for bucket in trained for what in values.tensors(bucket) if what != MASTER
    )
    # One after the other: beside the result a rank holds one whole bucket.
    tensors = {
        what: sharded_parameters(values, layout, what, factors.get(what, NO_FACTORS))
        for what in names
    }
    state = {}
    numbers = numbers_by_parameter(values.engine)
    for name in values.aliases:
        own = numbers.get(name, {})
        own |= {what: tensors[what][name] for what in names if name in tensors[what]}
        # torch.optim has no entry of a parameter without state either.
        if own:
            state[name] = own
    return {"state": state, "param_groups": saved_groups(made, groups)}


def _recounted(
    values: ModuleValues, groups: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Return factors [columns] of the moments, by moment and parameter, where an update rule counts
    the updates of single columns (ZenFlow): with them a moment means the same to a rule that
    corrects all of it by the number of steps."""
    engine = values.engine
    factors: dict[str, dict[str, Tensor]] = {what: {} for what in MOMENTS}
    for column in column_state(engine):
        name = column.spec.name
        step = engine.rules.by_bucket[values.bucket_of[name]].state(values.bucket_of[name])["step"]
        beta1, beta2 = groups[column.spec.group]["betas"]
        options = UpdateOptions(adam_beta1=beta1, adam_beta2=beta2)
        # Without any update the moments are zero.
        was = bias_corrections(column.updates.clamp(min=1), options, torch.float64)
        will_be = bias_corrections(step.clamp(min=1), options, torch.float64)
        for what, power, before, after in zip(MOMENTS, (1, 2), was, will_be, strict=True):
            factors[what][name] = (after / before) ** power
    return factors


def saved_groups(
    made: Sequence[ParameterGroup], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups as torch.optim saves them, with names for its numbers. They have all of
    torch's options: what loads them into torch asks for each."""
    is_adamw = all(group.rule in (ADAM, MUON) for group in made)
    defaults = torch.optim.AdamW([nn.Parameter(torch.empty(0))]).defaults if is_adamw else {}
    return [
        {
            "params": list(group["param_names"]),
            **({} if first.by_muon else defaults),
            **{
                name: value
                for name, value in group.items()
                if name not in ("params", "param_names")
            },
        }
        for first, group in zip(made, groups, strict=True)
    ]


def load_state_dict(
    values: ModuleValues,
    made: Sequence[ParameterGroup],
    groups: Sequence[dict[str, Any]],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
) -> None:
    """Take over a state of the form of this module, or its ``model`` or its ``optimizer`` alone.
    Collective, between two steps.

    Values are DTensors, of whatever mesh and placements, or plain tensors, which every rank then
    has whole. ``groups`` get the options of the state; ``made`` says what they may be. Raises
    CheckpointError on all ranks, with everything that is missing, unexpected, of another shape or
    no option of the optimizer, before anything is changed. Without ``strict`` what is missing stays
    as it is, and what is unexpected is left out."""
    values.engine.settle()
    loading = _Loading(values, made, groups, strict)
    with raise_on_all_ranks(values.engine.mesh.world):
        # All checks before any change: half of a state would be a model that was never trained.
        loading.check(state)
        if loading.problems:
            raise CheckpointError(listing("engine.load_state_dict:", loading.problems))
    loading.require_same_numbers()
    with torch.no_grad():
        loading.load()
    values.engine.publish()


class _Loading:
    """One state that is taken over: first everything is checked, then everything is written."""

    def __init__(
        self,
        values: ModuleValues,
        made: Sequence[ParameterGroup],
        groups: Sequence[dict[str, Any]],
        strict: bool,
    ) -> None:
        self.values = values
        self.made = made
        self.groups = groups
        self.strict = strict
        self.problems: list[str] = []
        self._parameters: list[tuple[str, str, Tensor]] = []
        """(parameter, which of its tensors, value)."""
        self._converted: list[tuple[str, str, tuple[str, ...], list[Tensor]]] = []
        """(parameter, moment, its tensors here, those of the state, which are of another form)."""
        self._buffers: list[tuple[str, Tensor, Tensor]] = []
        """(name, buffer, value)."""
        self._extra: list[tuple[nn.Module, Any]] = []
        self._numbers: dict[str, dict[str, float]] = {}
        """By parameter and name."""
        self._begun: dict[str, bool] = {}
        """By parameter, whether its state has values."""
        self._options: list[tuple[dict[str, Any], str, Any]] = []

    def check(self, state: Mapping[str, Any]) -> None:
        """Find what is to be written, and all problems."""
        parts = (MODEL, OPTIMIZER)
        if not isinstance(state, Mapping) or not state or any(key not in parts for key in state):
            keys = list(state)[:3] if isinstance(state, Mapping) else type(state).__name__
            self._problem(
                "state", keys, '{"model": ..., "optimizer": ...}', "give it in this form, or a part"
            )
            return
        if MODEL in state:
            self._check_model({clean_name(name): value for name, value in state[MODEL].items()})
        if OPTIMIZER in state:
            self._check_state(state[OPTIMIZER].get("state", {}))
            self._check_groups(state[OPTIMIZER].get("param_groups", ()))

    def require_same_numbers(self) -> None:
        """Raise CheckpointError on all ranks if one has other numbers, by which they decide
        together what is updated together. Collective."""
        said = crc32(repr(sorted(self._numbers.items())).encode())
        by_rank = all_gather_object(said, self.values.engine.mesh.world)
        unlike = [rank for rank, other in enumerate(by_rank) if other != by_rank[0]]
        if unlike:
            raise CheckpointError(
                "engine.load_state_dict",
                got=f"other step counts on rank {unlike[0]} than on rank 0",
                expected="the same state on all ranks",
                do="load the same checkpoint on all ranks",
            )

    def load(self) -> None:
        """Write everything. Collective: values are made whole one after the other."""
        values = self.values
        for name, what, value in self._parameters:
            whole = _whole(value)
            if what != MASTER and values.of_blocks(values.bucket_of[name], what):
                values.write_blocks(name, what, whole)
            else:
                values.write(name, what, values.layouts.part(name, whole).reshape(-1))
            if what == MASTER:
                values.uninitialized.discard(name)
            elif whole.is_floating_point():
                has_values = not bool(whole.isnan().all())
                self._begun[name] = self._begun.get(name, False) or has_values
        for name, moment, here, parts in self._converted:
            step = self._numbers[name].get("step", 0.0)
            given = [_whole(part) for part in parts]
            made = (
                quantised(moment, given[0], step)
                if len(here) == 2
                else [dequantised(moment, *given)]
            )
            self._begun[name] = True  # moments of AdamW, which have values from the start
            for what, value in zip(here, made, strict=True):
                if values.of_blocks(values.bucket_of[name], what):
                    values.write_blocks(name, what, value)
                else:
                    values.write(name, what, value)
        for name, buffer, value in self._buffers:
            buffer.copy_(_whole(value))
            values.uninitialized.discard(name)
        for module, value in self._extra:
            module.set_extra_state(value)
        if self._numbers:
            write_numbers(values.engine, self._numbers, self._begun)
        steps = {name: own["step"] for name, own in self._numbers.items() if "step" in own}
        if steps:
            # A rule that counts the updates of single columns takes the steps for all of them, and
            # selects columns anew.
            for column in column_state(values.engine):
                if column.spec.name in steps:
                    column.updates.fill_(steps[column.spec.name])
                column.selected.zero_()
            progress = rule_progress(values.engine)
            if progress is not None:
                progress.zero_()
            # Before the first step some optimizers have no number yet.
            resume_rules(values.engine, max(0 if isnan(n) else int(n) for n in steps.values()))
        for group, option, value in self._options:
            group[option] = value

    def _problem(self, where: str, got: object, expected: object, do: str) -> None:
        self.problems.append(describe(where, got=got, expected=expected, do=do))

    def _check_model(self, given: dict[str, Any]) -> None:
        values = self.values
        left = dict(given)
        for name, aliases in values.aliases.items():
            # As torch does where the names of a shared parameter have different values: the last
            # one counts. Files often have one of them only.
            candidates = [left.pop(alias) for alias in aliases if alias in left]
            if candidates:
                shape = values.shape(name)
                if self._fits(name, candidates[-1], shape):
                    self._parameters.append((name, MASTER, candidates[-1]))
            else:
                self._missing(name)
        names = {id(buffer): name for name, (_, _, buffer) in values.buffers().items()}
        names |= {id(parameter): name for name, parameter in values.ignored.items()}
        for alias, buffer in (*persistent_buffers(values.model), *values.ignored.items()):
            if alias not in left:
                self._missing(alias)
            elif self._fits(alias, value := left.pop(alias), tuple(buffer.shape)):
                self._buffers.append((names[id(buffer)], buffer, value))
        for alias, module in with_extra_state(values.model):
            if alias in left:
                self._extra.append((module, left.pop(alias)))
            else:
                self._missing(alias)
        self._unexpected(left)

    def _check_state(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        values = self.values
        left = {clean_name(str(name)): dict(state) for name, state in given.items()}
        numbers: dict[tuple[int, str], dict[str, str]] = {}
        """By bucket and name, the parameters that have each number, where they have to share it."""
        for bucket in values.engine.gradients.trainable:
            expected = values.state(bucket)
            shares = not is_divisible(values.engine, bucket)
            for placed in values.plan.buckets[bucket].placements:
                name = placed.spec.name
                aliases = [alias for alias in values.aliases[name] if alias in left]
                if not aliases:
                    if expected:
                        self._missing(f"optimizer state of {name}")
                    continue
                # torch's SGD without momentum says that it has none.
                own = {what: v for what, v in left.pop(aliases[0]).items() if v is not None}
                self._numbers[name] = {}
                converted: set[str] = set()
                for moment, here, there in tuple(other_forms(expected, own)):
                    parts = [own.pop(what) for what in there]
                    shapes = (values.shape(name), blocks_of(values.shape(name)))
                    fit = [
                        self._fits(f"{what} of {aliases[0]}", part, shape)
                        for what, part, shape in zip(there, parts, shapes, strict=False)
                    ]
                    if all(fit):
                        self._converted.append((name, moment, here, parts))
                    converted.update(here)
                for what, live in expected.items():
                    if what in converted:
                        continue
                    where = f"{what} of {aliases[0]}"
                    if what not in own:
                        # torch's Muon counts no steps, and needs none.
                        if what != "step" or not values.plan.buckets[bucket].kind.muon:
                            self._missing(where)
                    elif not live.dim():
                        number = float(own.pop(what))
                        self._numbers[name][what] = number
                        if shares:
                            numbers.setdefault((bucket, what), {})[repr(number)] = aliases[0]
                    elif self._fits(where, value := own.pop(what), values.state_shape(name, what)):
                        self._parameters.append((name, what, value))
                self._unexpected({f"{what} of {aliases[0]}": None for what in own})
        self._unexpected({f"optimizer state of {name}": None for name in left})
        for (_, what), found in numbers.items():
            if len(found) > 1:
                listed = ", ".join(f"{float(count):g} of {name}" for count, name in found.items())
                counts = "step counts" if what == "step" else f"numbers {what}"
                self._problem(
                    "optimizer",
                    f"other {counts} in one bucket: {listed}",
                    "one count: parameters of a bucket are updated together",
                    'load {"model": ...} alone',
                )

    def _check_groups(self, given: Sequence[Mapping[str, Any]]) -> None:
        group_of = {clean_name(str(n)): group for group in given for n in group.get("params", ())}
        for made, group in zip(self.made, self.groups, strict=True):
            taken = [option for option in group if option not in KEPT]
            values: dict[str, dict[Any, str]] = {}
            """By option, the parameters that have each value."""
            for name in group["param_names"]:
                saved = group_of.get(name)
                if saved is None:
                    if given:
                        self._missing(f"{name} in the groups of the optimizer")
                    continue
                try:
                    saved = made.read(saved)
                    options = {o: _plain(saved[o]) for o in taken if saved.get(o) is not None}
                    require_valid(name, options.get("lr"), None, None, None)
                    made.require_valid(name, {o: options.get(o, group[o]) for o in made.options})
                except (ConfigError, TypeError, ValueError) as error:
                    self.problems.append(f"an option of {name} is none: {error}")
                    continue
                for option, value in options.items():
                    values.setdefault(option, {})[value] = name
            for option, names in values.items():
                if len(names) > 1:
                    listed = ", ".join(f"{value} of {name}" for value, name in names.items())
                    self._problem(
                        option,
                        f"other values in one group: {listed}",
                        "one value",
                        "give shard groups like those of the state, or leave its param_groups out",
                    )
                self._options += [(group, option, value) for value in names]

    def _fits(self, where: str, value: Any, shape: tuple[int, ...]) -> bool:
        if not isinstance(value, Tensor):
            self._problem(where, type(value).__name__, "a tensor or DTensor", "convert it")
            return False
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            self._problem(where, "a DTensor of other ranks", "one of this rank", "load it here")
            return False
        if tuple(value.shape) != shape:
            self._problem(where, tuple(value.shape), shape, "load the state of this model")
            return False
        return True

    def _missing(self, what: str) -> None:
        if self.strict:
            self._problem(what, "nothing", "a value", "add it, or load with strict=False")

    def _unexpected(self, left: Mapping[str, Any]) -> None:
        if self.strict:
            for name in left:
                do = "take it out, or load with strict=False"
                self._problem(name, "a value", "nothing: the engine has no such thing", do)


def _whole(value: Tensor) -> Tensor:
    """Return all of a value. Collective for a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _plain(value: Any) -> Any:
    """Return an option as numbers, switches and words as they are."""
    if isinstance(value, list | tuple):
        return tuple(map(float, value))
    return value if isinstance(value, bool | int | str) else float(value)
