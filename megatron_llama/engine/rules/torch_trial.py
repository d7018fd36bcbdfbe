"""The trial of an optimizer before it gets shards: is it elementwise, and which state does it keep?

A few steps with drawn numbers are made with a matrix, and with the same elements as two flat parts
that take turns. An elementwise optimizer makes the same bits of both. One that asks for norms, rows
or columns, that draws numbers, or that counts its own steps does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.options import StateTensor, TorchGroup
from megatron_llama.engine.rules.torch_rule import constructed, make_optimizer, step_part
from megatron_llama.errors import ConfigError

ROWS, COLUMNS = 4, 64
STEPS = 3
LR = 1e-2
"""The learning rate of a trial if the group's is 0: warm-up begins there."""
INSTEAD = (
    "use ml.AdamW, or an optimizer that treats each element by itself and keeps tensors of the "
    "parameter's shape or of no dim"
)


@dataclass(frozen=True)
class _Outcome:
    """The values [n] and the state of the steps of a trial."""

    values: Tensor
    state: dict[str, Tensor]
    """[n], flat, or 0-dim."""

    def equals(self, other: _Outcome) -> bool:
        """Whether all bits are the same."""
        return (
            self.state.keys() == other.state.keys()
            and torch.equal(self.values, other.values)
            and all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        )


def describe_group(
    where: str,
    bare: torch.optim.Optimizer,
    options: Mapping[str, Any],
    *,
    lr: float,
    device: torch.device,
) -> TorchGroup:
    """Return a group of parameters with these options, as the engine's rules read it, after a trial
    on ``device``. ``bare`` is the optimizer without parameters (``bare_optimizer``); messages call
    it ``where``. Raises ConfigError if it is not elementwise."""
    group = TorchGroup(optimizer=bare, options=dict(options))
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float32).to(device)
        for _ in range(1 + STEPS)
    ]
    trial = _Trial(where, group, lr or LR, drawn[0], drawn[1:])
    whole = trial.run([ROWS * COLUMNS], matrix=True)
    parts = trial.run([COLUMNS, (ROWS - 1) * COLUMNS])
    if not whole.equals(parts):
        raise _refused(
            where,
            "other results for the parts of a matrix than for the matrix",
            "the same bits: a rank has parts of parameters, and no norms, rows and columns of them",
        )
    initial = dict.fromkeys(whole.state, 0.0)
    for name, tensor in constructed(trial.optimizer, drawn[0].double()).items():
        initial[name] = float(tensor.flatten()[0])
    begun = trial.run([ROWS * COLUMNS], initial)
    return replace(
        group,
        state=tuple(
            StateTensor(
                name,
                bool(tensor.dim()),
                None if tensor.dim() and tensor.dtype == torch.float32 else tensor.itemsize,
            )
            for name, tensor in whole.state.items()
        ),
        initial=initial if begun.equals(whole) else None,
    )


class _Trial:
    """Some steps of one optimizer."""

    def __init__(
        self, where: str, group: TorchGroup, lr: float, values: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        self._where = where
        self._group = group
        self._lr = lr
        self._values = values
        self._gradients = gradients
        self.optimizer = make_optimizer(group, values.device, lr=lr)

    def run(
        self,
        sizes: Sequence[int],
        initial: Mapping[str, float] | None = None,
        *,
        matrix: bool = False,
    ) -> _Outcome:
        """Make all steps, with so many elements at a time, and return all values and the state.
        ``initial``: numbers with which all state begins, in the place of what the optimizer makes.
        Raises ConfigError."""
        self.optimizer = optimizer = make_optimizer(self._group, self._values.device, lr=self._lr)
        attributes = _numbers(vars(optimizer))
        options = _numbers(optimizer.param_groups[0])
        shape = self._values.shape if matrix else (-1,)
        parts = [
            part.clone().view(shape) for part in torch.split(self._values.flatten(), list(sizes))
        ]
        states: list[dict[str, Tensor]] = [
            constructed(optimizer, part)
            if initial is None
            else {name: self._filled(part, name, value) for name, value in initial.items()}
            for part in parts
        ]
        for gradient in self._gradients:
            for number, part in enumerate(torch.split(gradient.flatten(), list(sizes))):
                before = states[number]
                states[number] = self._step(
                    optimizer, parts[number], part.clone().view(shape), before
                )
                if before and before.keys() != states[number].keys():
                    got = (
                        f"other state after a later step ({_listed(states[number])}) than before it"
                    )
                    raise _refused(self._where, got, "all state from the first step on")
        # After the steps: what counts steps by itself would count those of each part.
        for said, now in (
            ("attribute", _numbers(vars(optimizer)) != attributes),
            ("option of its group", _numbers(optimizer.param_groups[0]) != options),
        ):
            if now:
                raise _refused(
                    self._where,
                    f"a step that changes an {said}",
                    "all that changes in the state of parameters",
                )
        first = states[0]
        return _Outcome(
            torch.cat([part.flatten() for part in parts]),
            {
                name: torch.cat([state[name].flatten() for state in states])
                if first[name].shape == parts[0].shape
                else first[name]
                for name in first
            },
        )

    def _filled(self, part: Tensor, name: str, value: float) -> Tensor:
        like = self._step(
            make_optimizer(self._group, part.device, lr=self._lr),
            part.clone(),
            torch.ones_like(part),
            constructed(self.optimizer, part),
        )[name]
        return torch.full_like(like, value)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        try:
            # A user's optimizer may draw numbers, and the script's own shall stay what they are.
            with torch.random.fork_rng(devices=[]):
                left = step_part(optimizer, values, gradient, state)
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise _refused(
                self._where, f"an error in a step of a part: {words}", "a step"
            ) from error
        for name, value in left.items():
            if not isinstance(value, Tensor):
                raise _refused(
                    self._where,
                    f"{name} of {type(value).__name__} in the state of a parameter",
                    "a tensor, which is saved, resharded and left alone in a skipped step",
                )
            if value.dim() and value.shape != values.shape:
                raise _refused(
                    self._where,
                    f"{name} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(values.shape)}",
                    "tensors of the parameter's shape or of no dim",
                )
        return left


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some attributes that are plain numbers; no truth values: torch's own
    optimizers note there what they have checked."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _listed(state: Mapping[str, Tensor]) -> str:
    return ", ".join(state) or "none"


def _refused(where: str, got: str, expected: str) -> ConfigError:
    return ConfigError(where, got=got, expected=expected, do=INSTEAD)
