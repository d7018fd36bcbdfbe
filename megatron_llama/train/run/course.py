"""The position of a run, and the plan for the end of its current step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_llama.checkpoint.meta import TrainState


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. All ranks have the same."""

    loss: float
    count: int
    """The number of target tokens, or pairs, over which the loss is the mean."""
    numbers: Mapping[str, float]
    """Numbers of the objective beside the loss, by name."""


class Course:
    """The state that the loop and its parts share. All ranks have the same.

    The loop writes ``state`` and the requests; a part may ask for an early end or a return.
    """

    def __init__(self, state: TrainState, is_last: Callable[[TrainState], bool]) -> None:
        """``is_last`` says whether no step follows a state."""
        self._is_last = is_last
        self.state = state
        """The position after the current step."""
        self.evaluations: dict[int, Evaluation] = {}
        """The evaluations of this run, by iteration."""
        self.validation_numbers: Mapping[str, float] = {}
        """Numbers of the last evaluation, which a return does not take back."""
        self.save_asked = False
        """Whether some rank was asked for a checkpoint after this step."""
        self.stopping = False
        """Whether the run ends after this step on request, or for --exit-interval."""
        self.early_stop_reason: str | None = None
        """Why the run ends after this step although more were planned and no rank asked for an
        end."""
        self.must_return = False
        """Whether the run has to go back because of a save that was not kept."""

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self._is_last(self.state)

    @property
    def is_complete(self) -> bool:
        """Whether the run has come to its planned or early end, and was not only interrupted."""
        return self.early_stop_reason is not None or self.is_last

    @property
    def ends(self) -> bool:
        """Whether the run ends after this step."""
        return self.stopping or self.is_complete

    def keep_evaluation(self, evaluation: Evaluation) -> None:
        """Keep the evaluation of the current state."""
        self.evaluations[self.state.iteration] = evaluation
        self.validation_numbers = evaluation.numbers

    def rewind(self, state: TrainState) -> None:
        """Go back to ``state`` and forget what came later."""
        self.state = state
        self.early_stop_reason = None
        self.must_return = False
        for iteration in [at for at in self.evaluations if at > state.iteration]:
            del self.evaluations[iteration]
