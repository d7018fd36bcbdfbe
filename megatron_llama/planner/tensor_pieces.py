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
    times = _Pieces(pieces, tp, job.stream, 1 if job.sequence_parallel else 2)

    def shown(exposed: float) -> float:
        return exposed + fit.parameters_exposed * (times.sent - exposed)

    if not job.sequence_parallel:
        return sum(shown(times.behind(product)) for product in products[True]), whole
    own = 1 / job.tp
    # Keys and values with a weight of their own are multiplied with the same pieces as queries.
    *queries, gate = products[False]
    forward = sum(shown(times.before(product, own)) for product in (sum(queries), gate))
    forward += sum(shown(times.behind(product)) for product in products[True])
    attention, mlp = products[True]
    # The MLP's weight gradient, as long as its product in the same precision, waits for the
    # attention's gradient to be on its way; schedules that split a pass put it off.
    *_, down = job.matmuls
    gradient = kernels.matmul(down, reduced=kernels.all_narrow) * scale
    kept = gradient if job.bubble == 1 else 0.0
    gathered = shown(times.before(mlp, own)) + shown(times.before(attention, own, kept))
    # What column-parallel layers send backward is not cut: counted as it is without pieces.
    return forward, whole / 2 + gathered


class _Pieces:
    """The times of a message in pieces: ``collectives`` gathers or reduce-scatters each."""

    def __init__(self, pieces: int, tp: RankGroup, size: float, collectives: int) -> None:
        self._count = pieces
        # Ranks wait for each other before the first piece. Then they are in step.
        self._start = collectives * tp.latency
        self._piece = collectives * (tp.gather(size / pieces) - tp.latency)
        self.sent = self._start + pieces * self._piece
        """Seconds of all pieces."""

    def before(self, product: float, own: float, other: float = 0.0) -> float:
        """Return the exposed seconds of pieces that are multiplied when they have arrived, after
        the rank's ``own`` share of the rows and ``other`` seconds of work."""
        clock = own * product + other
        for number in range(1, self._count + 1):
            arrival = self._start + number * self._piece
            clock = max(clock, arrival) + (1 - own) * product / self._count
        return clock - product - other

    def behind(self, product: float) -> float:
        """Return the exposed seconds of pieces that are sent when they have been multiplied."""
        clock = self._start
        for number in range(1, self._count + 1):
            clock = max(clock, number * product / self._count) + self._piece
        return clock - product
