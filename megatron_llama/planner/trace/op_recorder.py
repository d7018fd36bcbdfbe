"""Records every operator, message and storage of a rank, by the action of the schedule in which it
occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.planner.trace.operators import Recipe, cost, tensors
from megatron_llama.planner.trace.storages import Storages
from megatron_llama.planner.traced import ActionSegment, Message, Operator, TracedAction

_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_VIEW = torch.ops.aten.view.default


@dataclass
class Tables:
    """The distinct operators, messages and segments of all ranks of a run, with their numbers."""

    operators: dict[Operator, int] = field(default_factory=dict)
    messages: dict[Message, int] = field(default_factory=dict)
    segments: dict[ActionSegment, int] = field(default_factory=dict)

    def operator(self, one: Operator) -> int:
        """Return the operator's number in calls."""
        return self.operators.setdefault(one, len(self.operators))

    def message(self, one: Message) -> int:
        """Return the message's number in calls, which is negative."""
        return -1 - self.messages.setdefault(one, len(self.messages))

    def segment(self, one: ActionSegment) -> int:
        """Return the segment's number."""
        return self.segments.setdefault(one, len(self.segments))


class _NoTime:
    """A note in a timeline without a clock."""

    def end(self) -> None:
        """Do nothing, since only the order of notes is recorded."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, which sees operators, joined with the timeline of a recorder, which sees
    messages and knows the present action."""

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
    def recording(self) -> Iterator[None]:
        """Record the step that runs in this context. Storages that exist before are the state."""
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
        """The actions of the step."""
        return tuple(self._actions)

    def _follow(self) -> None:
        """Begin another segment if another action has begun."""
        if self._begun and self.recorder.doing is not self._doing:
            self._close()
            self._doing = self.recorder.doing
            self._open()

    def _note(self, kind: str, what: Any) -> _NoTime:
        """Record a note of ``Recorder.timeline``: an action of the schedule, or a message."""
        if self._begun:
            self._follow()
            if kind == "message":
                axis, operation, size, _ = what
                self._calls.append(self.tables.message(Message(axis, operation, size)))
        return _NoTime()

    def _now(self) -> int:
        self._follow()
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
        """Run the operator and record it."""
        # Models ask for devices often, and a dispatch is slow.
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        named = kwargs or {}
        # Below autograd both do the same, but FakeTensorMode's cache of shapes forgets that the
        # result of _unsafe_view shares the memory of its input.
        func = _VIEW if func is _UNSAFE_VIEW else func
        results = func(*args, **named)
        recipe = self._recipes.get(func)
        if recipe is None:
            recipe = self._recipes[func] = Recipe.of(func)
        if not recipe.written:
            for tensor in tensors(results):
                self.storages.see(tensor)
        if self._begun and recipe.works:
            self._follow()
            costs = cost(recipe, args, named, results)
            self._calls.append(
                self.tables.operator(
                    Operator(recipe.name, costs.shapes, costs.dtype, costs.flops, costs.bytes)
                )
            )
        return results
