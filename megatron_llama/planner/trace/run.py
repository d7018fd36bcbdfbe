"""The trace of a whole run. One pipeline rank of each kind is traced with few microbatches; the
other ranks and microbatches follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.fp8 import fp8_layers
from megatron_llama.model.plan.params import partition_of
from megatron_llama.model.windows import chunk_of, window_of
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from megatron_llama.planner.trace.op_recorder import Tables
from megatron_llama.planner.trace.rank import BATCHES, trace_rank
from megatron_llama.planner.trace.repeats import composed, lengthened, period, steady
from megatron_llama.planner.traced import StageTrace, Trace, TracedAction
from megatron_llama.schedule import Schedule, schedule_named
from megatron_llama.train.setup.description import describe_config

FEW = 5
"""Microbatches that show the pattern: the first, the last, and equal ones between them."""
ATTEMPTS = 2
"""Attempts to leave out repetitions before all microbatches are traced."""


def trace_run(config: Config, world_size: int) -> Trace:
    """Return the step of every pipeline rank of a resolved configuration, with every ``auto``
    decided, on ``world_size`` processes. Must not be called while a process group exists."""
    tracer = RunTracer.of(config, world_size)
    return tracer.trace([stage for ranks in tracer.alike() for stage in tracer.traced(ranks)])


@dataclass(frozen=True)
class RunTracer:
    """Traces ranks of one run into common tables."""

    config: Config
    world_size: int
    whole: Schedule
    tables: Tables

    @staticmethod
    def of(config: Config, world_size: int) -> RunTracer:
        """Return the tracer of a run, as ``trace_run`` takes it."""
        training = config.training
        microbatches = training.global_batch_size // (
            training.micro_batch_size * dp_size(config, world_size)
        )
        return RunTracer(config, world_size, _schedule(config, microbatches), Tables())

    def trace(self, stages: Iterable[StageTrace]) -> Trace:
        """Return the trace of these stages, which were traced into the tables."""
        layout = describe_config(self.config, self.world_size)["layout"]
        return Trace(
            label=f"{self.config.model.preset or 'model'}: {layout}",
            world_size=self.world_size,
            microbatches=self.whole.microbatches,
            operators=tuple(self.tables.operators),
            messages=tuple(self.tables.messages),
            segments=tuple(self.tables.segments),
            stages=tuple(sorted(stages, key=lambda stage: stage.ranks)),
        )

    def alike(self) -> list[list[int]]:
        """Return groups of pipeline ranks with equal numbers of layers, multiplied in the same
        precision and with the same windows, chunks and experts, and equal ends."""
        model = self.config.model
        partition = partition_of(self.config)
        in_fp8 = fp8_layers(self.config)
        groups = dict[object, list[int]]()
        for rank in range(len(self.whole.ranks)):
            stages = partition.stages_of(rank)
            shape = tuple(
                (
                    tuple(
                        (
                            layer in in_fp8,
                            window_of(model, layer),
                            chunk_of(model, layer),
                            is_sparse(model, layer),
                        )
                        for layer in partition.layers[stage]
                    ),
                    stage == 0,
                    stage == partition.stages - 1,
                )
                for stage in stages
            )
            groups.setdefault(shape, []).append(rank)
        return list(groups.values())

    def traced(self, ranks: Sequence[int]) -> Iterator[StageTrace]:
        """Yield the steps of ranks that are alike. They are composed from the trace of one rank if
        possible. Otherwise each rank is traced."""
        few = -(-FEW // self._turn) * self._turn
        if self.whole.microbatches > few and self._separable(ranks[0]):
            short = _schedule(self.config, few)
            step = trace_rank(self.config, self.world_size, ranks[-1], short, self.tables)
            compositions = [self._composed(step, short, ranks[-1], rank) for rank in ranks]
            if all(actions is not None for actions in compositions):
                for rank, actions in zip(ranks, compositions, strict=True):
                    assert actions is not None
                    yield self._as(replace(step, actions=actions), short, ranks[-1], rank)
                return
        for rank in ranks:
            yield self._alone(rank)

    def _composed(
        self, step: StageTrace, short: Schedule, rank: int, other: int
    ) -> tuple[TracedAction, ...] | None:
        stages = self._stages(rank, other)
        segments = list(self.tables.segments)
        return composed(step.actions, short.ranks[rank], self.whole.ranks[other], stages, segments)

    @property
    def _turn(self) -> int:
        """Number of microbatches that an interleaved schedule runs together."""
        return (
            len(self.whole.ranks)
            if self.config.parallel.virtual_pipeline_model_parallel_size > 1
            else 1
        )

    def _separable(self, rank: int) -> bool:
        """Whether the work of a pass depends on its own microbatch alone: no parameters share
        slots, and no gradients do if a rank has several stages."""
        dp = dp_size(self.config, self.world_size) * self.config.parallel.context_parallel_size
        layout = rank_bucket_plan(self.config, dp=dp, rank=rank)
        slots = len(set(layout.gradient_slots)) == len(layout.buckets) or self.whole.virtual == 1
        return slots and all(layout.has_own_slot(bucket.index) for bucket in layout.buckets)

    def _stages(self, rank: int, other: int) -> dict[int, int]:
        """Return the stages of ``rank`` by those of ``other``."""
        partition = partition_of(self.config)
        return dict(zip(partition.stages_of(other), partition.stages_of(rank), strict=True))

    def _as(self, step: StageTrace, short: Schedule, rank: int, other: int) -> StageTrace:
        """Return the trace of ``rank``, changed to that of ``other`` and of all microbatches."""
        away = (other - rank) * (self.world_size // len(self.whole.ranks))
        groups = {
            axis: ranks if _leads_away(axis) else tuple(peer + away for peer in ranks)
            for axis, ranks in step.groups.items()
        }
        blocks = [partition_of(self.config).layers[stage] for stage in self._stages(rank, other)]
        layers = tuple((stage_blocks.start, len(stage_blocks)) for stage_blocks in blocks)
        size = step.state[BATCHES] // short.microbatches * self.whole.microbatches
        return replace(
            step, ranks=(other,), layers=layers, groups=groups, state={**step.state, BATCHES: size}
        )

    def _alone(self, rank: int) -> StageTrace:
        """Return the step of one rank, traced without repeated microbatches where possible."""
        for short, times, (size, end) in self._shorter(rank):
            step = trace_rank(self.config, self.world_size, rank, short, self.tables)
            # The start of the step comes before the actions of the schedule.
            turn = steady(step.actions, size, end + 1)
            if turn is not None:
                actions = lengthened(step.actions, *turn, times, self.whole.ranks[rank])
                return self._as(replace(step, actions=actions), short, rank, rank)
        return trace_rank(self.config, self.world_size, rank, self.whole, self.tables)

    def _shorter(self, rank: int) -> Iterator[tuple[Schedule, int, tuple[int, int]]]:
        """Yield the shortest schedules that lack only repetitions of the whole schedule, with the
        number of these repetitions and their (size, end)."""
        yielded = 0
        for microbatches in range(self._turn, self.whole.microbatches, self._turn):
            short = _schedule(self.config, microbatches)
            times, rest = divmod(self.whole.microbatches - microbatches, self._turn)
            place = None if rest else period(short.ranks[rank], self.whole.ranks[rank], times)
            if place is not None:
                yield short, times, place
                yielded += 1
            if yielded == ATTEMPTS:
                return


def _leads_away(axis: str) -> bool:
    """Whether an axis contains ranks of other pipeline ranks."""
    return axis.startswith(("world", "pp", "embedding"))


def _schedule(config: Config, microbatches: int) -> Schedule:
    parallel = config.parallel
    return schedule_named(
        parallel.pipeline_schedule,
        ranks=parallel.pipeline_model_parallel_size,
        microbatches=microbatches,
        virtual=parallel.virtual_pipeline_model_parallel_size,
    )
