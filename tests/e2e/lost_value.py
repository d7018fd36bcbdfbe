"""One rank of a run whose memory is faulty: ``python -m tests.e2e.lost_value STATE ROW once|always pretrain ...``.

Behind the third update a value of the embedding's row becomes NaN: in the weights (``master``) or in a moment.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron_llama.cli import main
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.engine.pieces import shard_pieces, step_counts

EMBEDDING = "model.embed_tokens.weight"
UPDATES, COLUMN = 3, 7


def lose(state: str, row: int, *, once: bool) -> None:
    """From now on engines of this process lose the value: ``once``, or whenever the run comes to that update."""
    sound, lost = OverlappedDistributedOptimizer.step, False

    def faulty(self: OverlappedDistributedOptimizer, *args: Any, **named: Any) -> StepResult:
        nonlocal lost
        done = sound(self, *args, **named)
        self.settle()
        here = max(map(int, step_counts(self)), default=0) == UPDATES
        for piece in shard_pieces(self) if here and not (once and lost) else ():
            first, rows = piece.rectangle.offset[0], piece.rectangle.size[0]
            if piece.rectangle.name == EMBEDDING and first <= row < first + rows:
                piece.tensors[state][row - first, COLUMN] = torch.nan
        lost = lost or here
        return done

    OverlappedDistributedOptimizer.step = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    state, row, how, *argv = sys.argv[1:]
    lose(state, int(row), once=how == "once")
    sys.exit(main(argv))
