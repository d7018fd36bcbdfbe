"""The pieces into which ``--tp-comm-overlap`` cuts the messages of tensor parallelism.

A piece is some rows of every rank's part of the sequence, so that each rank sends and receives as
much of each.
"""

from __future__ import annotations

from megatron_llama.config.schema import Config

SYMMETRIC = "symm_mem"
"""The value that means torch's fused operators over symmetric memory instead of pieces."""
FEW_TOKENS = 256
"""``auto`` makes no piece of fewer tokens a rank: two tiles of a matrix product, and a message that
is worth its start."""
MOST_PIECES = 4
"""``auto`` makes no more pieces: a quarter of a message is left to wait for."""


def piece_spans(rows: int, pieces: int) -> tuple[slice, ...]:
    """Cut ``rows`` into pieces whose lengths differ by 1 at most; fewer where there are fewer
    rows."""
    count = max(1, min(rows, pieces))
    return tuple(
        slice(rows * piece // count, rows * (piece + 1) // count) for piece in range(count)
    )


def chosen_pieces(config: Config) -> int:
    """Return the number of pieces that ``--tp-comm-overlap`` means: 1 leaves messages whole, as the
    fused operators do for all that plans count."""
    parallel = config.parallel
    wanted = parallel.tp_comm_overlap
    if parallel.tensor_model_parallel_size == 1 or wanted == SYMMETRIC:
        return 1
    if wanted != "auto":
        return max(1, int(wanted))
    training = config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = training.micro_batch_size * training.seq_length // ranks
    return max(1, min(MOST_PIECES, tokens // FEW_TOKENS))
