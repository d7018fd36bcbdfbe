"""Exposed time of tensor-parallel messages that are cut into pieces (``model/nn/pieces.py``)."""

from __future__ import annotations

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.links import RankGroup
from megatron_llama.planner.training_job import TrainingJob

ROW_PARALLEL = ("o_proj", "down_proj")


def exposed_pieces(
    job: TrainingJob, tp: RankGroup, kernels: Kernels, fit: Coefficients
) -> tuple[float, float]:
    """Return the exposed seconds of one block's messages over tp in a forward and in a backward
    pass, of a job with several pieces.

    A message that a product hides still takes memory and processors from it: the share that
    ``parameters_exposed`` says."""
    scale = fit.family(job.traits.family)
    products: dict[bool, list[float]] = {True: [], False: []}
    matrices = [spec for spec in job.weights if len(spec.shape) > 1]
    for spec, matmul in zip(matrices, job.matmuls, strict=True):
        is_row = any(name in spec.name for name in ROW_PARALLEL)
        products[is_row].append(kernels.matmul(matmul) * scale)
    pieces = job.tensor_pieces
    whole = 2 * tp.reduce(job.stream)

    def shown(exposed: float, sent: float) -> float:
        return exposed + fit.parameters_exposed * (sent - exposed)

    if not job.sequence_parallel:
        piece = tp.reduce(job.stream / pieces)
        sent = pieces * piece
        sums = (shown(_behind(product, piece, pieces), sent) for product in products[True])
        return sum(sums), whole
    piece = tp.gather(job.stream / pieces)
    sent = pieces * piece
    own = 1 / job.tp
    # Keys and values with a weight of their own are multiplied with the same pieces as queries.
    *queries, gate = products[False]
    columns = [sum(queries), gate]
    forward = sum(shown(_before(product, own, piece, pieces), sent) for product in columns)
    forward += sum(shown(_behind(product, piece, pieces), sent) for product in products[True])
    gathered = (shown(_before(product, own, piece, pieces), sent) for product in products[True])
    # What column-parallel layers send backward is not cut: counted as it is without pieces.
    return forward, whole / 2 + sum(gathered)


def _before(product: float, own: float, piece: float, pieces: int) -> float:
    """Return the exposed seconds of pieces that are multiplied when they have arrived, after the
    rank's own share of the rows."""
    clock = own * product
    for number in range(1, pieces + 1):
        clock = max(clock, number * piece) + (1 - own) * product / pieces
    return clock - product


def _behind(product: float, piece: float, pieces: int) -> float:
    """Return the exposed seconds of pieces that are sent when they have been multiplied."""
    clock = 0.0
    for number in range(1, pieces + 1):
        clock = max(clock, number * product / pieces) + piece
    return clock - product
