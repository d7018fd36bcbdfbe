"""Looks on while a rank works: every operator, every message and every storage, by the action of
the schedule in which it happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.distributed.recorder import Recorder
from megatron_llama.planner.trace.operators import Recipe, cost, tensors
from megatron_llama.planner.trace.storages import Storages
from megatron_llama.planner.traced import ActionSegment, Message, Operator, TracedAction

_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_VIEW = torch.ops.aten.view.default


@dataclass
class Tables:
    """What several ranks of one run have in common: operators, messages and segments, each once."""

    operators: dict[Operator, int] = field(default_factory=dict)
    messages: dict[Message, int] = field(default_factory=dict)
    segments: dict[ActionSegment, int] = field(default_factory=dict)

    def operator(self, one: Operator) -> int:
        """Its number as a call."""
        return self.operators.setdefault(one, len(self.operators))

    def message(self, one: Message) -> int:
        """Its number as a call: a negative one."""
        return -1 - self.messages.setdefault(one, len(self.messages))

    def segment(self, one: ActionSegment) -> int:
        """Its number."""
        return self.segments.setdefault(one, len(self.segments))


class _Over:
    """A note of a timeline that has no clock."""

    def end(self) -> None:
        """See Note."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, and the timeline of a recorder, which says which action is under way."""

    def __init__(self, tables: Tables, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tables = tables
        self.recorder = recorder
        recorder.timeline = self._note
        self.storages = Storages(self._now)
        self._recipes: dict[torch._ops.OpOverload, Recipe] = {}
        self._begun = False
        self._doing: object = None
        self._calls: list[int] = []
        self._actions: list[TracedAction] = []
        self._start = self._state = 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """The step that is noted happens in here; what there is when it begins is the state."""
        self.storages.begin()
        self._begun = True
        self._doing = self.recorder.doing
        self._state = self.storages.live
        self._open()
        yield
        self._close()
        self._begun = False

    @property
    def actions(self) -> tuple[TracedAction, ...]:
        """Of the step."""
        return tuple(self._actions)

    def _look(self) -> None:
        """Another action may have begun."""
        if self._begun and self.recorder.doing is not self._doing:
            self._close()
            self._doing = self.recorder.doing
            self._open()

    def _note(self, kind: str, what: Any) -> _Over:
        """See ``Recorder.timeline``: actions of the schedule, and messages."""
        if self._begun:
            self._look()
            if kind == "message":
                axis, operation, size, _ = what
                self._calls.append(self.tables.message(Message(axis, operation, size)))
        return _Over()

    def _now(self) -> int:
        self._look()
        return len(self._actions)

    def _open(self) -> None:
        storages = self.storages
        self._calls = []
        self._start = storages.live
        storages.peak = storages.live
        storages.allocated = 0
        storages.freed = 0

    def _close(self) -> None:
        storages = self.storages
        segment = ActionSegment(
            tuple(self._calls), storages.allocated, storages.freed, storages.peak - self._start
        )
        self._actions.append(
            TracedAction(str(self._doing), self.tables.segment(segment), self._start - self._state)
        )

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """RunTracer the operator and note it."""
        if func is _DEVICE:  # asked for often, and dear to answer by a dispatch
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        named = kwargs or {}
        # The same to whoever comes here, who is below autograd; but a cache of shapes forgets that
        # this one shares its memory.
        func = _VIEW if func is _UNSAFE_VIEW else func
        results = func(*args, **named)
        recipe = self._recipes.get(func)
        if recipe is None:
            recipe = self._recipes[func] = Recipe.of(func)
        if not recipe.written:
            for tensor in tensors(results):
                self.storages.see(tensor)
        if self._begun and recipe.works:
            self._look()
            found = cost(recipe, args, named, results)
            self._calls.append(
                self.tables.operator(
                    Operator(recipe.name, found.shapes, found.dtype, found.flops, found.bytes)
                )
            )
        return results
