"""A configuration of this trainer as the planner sees it: its plans, timed. Every byte and message
is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_llama.config.schema import Config
from megatron_llama.planner.candidate_job import job_of
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.job import Job, Machine
from megatron_llama.planner.kernels import Kernels, Pass
from megatron_llama.planner.links import axes_of
from megatron_llama.planner.oom_probability import out_of_memory
from megatron_llama.planner.simulate import StageTimes, simulate, tail
from megatron_llama.planner.steps import Step, block_of, host_wait, straggling, update_bytes
from megatron_llama.plans.buckets import strategy_named
from megatron_llama.plans.memory import MemoryPlan, state_bytes
from megatron_llama.plans.schedule import Op
from megatron_llama.plans.traffic import StepTraffic

ENOUGH = 2
"""Microbatches for each pipeline rank after which more of them repeat the same pattern: memory has
its peak, a step grows evenly."""


@dataclass(frozen=True)
class Planned:
    """A configuration on a machine. ``config`` is resolved, and valid for the machine's GPUs."""

    config: Config
    machine: Machine
    fit: Coefficients

    @cached_property
    def job(self) -> Job:
        """The work of a step."""
        return job_of(self.config, self.machine)

    @cached_property
    def few(self) -> Config:
        """The configuration with as many microbatches as show the pattern."""
        job = self.job
        training = self.config.training
        everything = (
            self.config.parallel.pipeline_schedule == "gpipe"
        )  # whose memory grows with each
        few = job.microbatches if everything else min(job.microbatches, ENOUGH * job.pp)
        return replace(
            self.config,
            training=replace(training, global_batch_size=few * job.micro_batch * job.dp),
        )

    @cached_property
    def short(self) -> MemoryPlan:
        """The plans of these."""
        return MemoryPlan(self.few, self.machine.gpus)

    @cached_property
    def traffic(self) -> tuple[StepTraffic, ...]:
        """What each pipeline rank sends in a step of these."""
        return tuple(self.short.traffic(rank) for rank in range(self.job.pp))

    @cached_property
    def recomputing(self) -> int:
        """Blocks of each stage that recompute."""
        return self.short.chosen() if self.config.parallel.recompute_granularity != "none" else 0

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of a pipeline rank by component, at the worst moment."""
        plan = self.short
        granularity = self.config.parallel.recompute_granularity
        state = state_bytes(self.config, plan.layouts[rank])
        parts = {
            "weights": state["parameters"] + state["parameter shards"],
            "gradients": state["gradients"],
            "optimizer": state["master weights"] + state["moments"] + state.get("hot columns", 0),
        }
        logits = plan.logits(rank)
        return {
            **parts,
            "activations": plan.activations(rank, granularity, self.recomputing) - logits,
            "logits": logits,
        }

    @cached_property
    def fullest(self) -> dict[str, int]:
        """Memory of the rank that needs most."""
        return max(
            (self.memory(rank) for rank in range(self.job.pp)),
            key=lambda parts: sum(parts.values()),
        )

    @cached_property
    def oom_probability(self) -> float:
        """Probability of running out of memory, the device's or the host's."""
        here = out_of_memory(sum(self.fullest.values()), self.machine.gpu.memory)
        return (
            max(here, out_of_memory(self.host_bytes, self.machine.gpu.host_memory))
            if self.host_bytes
            else here
        )

    @cached_property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """Of one microbatch, at every stage, with the bytes that its rank sends for one."""
        job = self.job
        plan = self.short
        axes = axes_of(self.job, self.fit)
        kernels = Kernels(job, self.fit)
        pure = replace(job, recomputed=0.0, recomputed_memory=0.0)
        block = block_of(pure, axes, kernels, self.fit)
        head = kernels.head()
        again = replace(
            job,
            recomputed=float(job.recomputed > 0),
            recomputed_memory=0.5 * (job.recomputed_memory > 0),
        )
        costly = block_of(again, axes, kernels, self.fit).backward
        weight = Pass(matmul=kernels.weight_gradients(), launch=block.forward.launch).seconds
        times = []
        for stage, layers in enumerate(plan.partition.layers):
            count = len(layers)
            recompute = min(self.recomputing, len(layers))
            last = stage == plan.partition.stages - 1
            ends = (stage == 0) * 0.5 * axes.tp.reduce(job.stream)
            backward = (
                (count - recompute) * block.backward.seconds
                + recompute * costly.seconds
                - count * weight
            )
            gathers, reductions = self._beside(plan.partition.placement[stage])
            times.append(
                StageTimes(
                    forward=count * block.forward.seconds + last * head.seconds + ends,
                    backward_input=backward + last * head.seconds,
                    backward_weight=count * weight
                    + (last and not job.trained.head_frozen) * head.seconds,
                    gather_forward=gathers / 2,
                    gather_backward=gathers / 2,
                    reduce=reductions,
                    slowdown=self.fit.parameters_exposed,
                )
            )
        return tuple(times)

    def _beside(self, rank: int) -> tuple[float, float]:
        """Seconds of gathers and of reductions for one microbatch at one stage of a rank; what is
        sent once a step is left out."""
        config = self.config
        plan = self.short
        strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
        if not strategy.reduce_every_microbatch or self.job.dp * self.job.cp == 1:
            return 0.0, 0.0
        axes = axes_of(self.job, self.fit)
        traffic = self.traffic[rank]
        layout = plan.layouts[rank]
        passes = plan.schedule.microbatches * plan.schedule.virtual
        once = all(layout.resident(bucket.index) for bucket in layout.buckets)
        gathers = (
            0.0 if once else axes.shards.gather(traffic.gather_bytes, traffic.gathers) / passes
        )
        return gathers, axes.shards.gather(traffic.reduction_bytes, traffic.reductions) / passes

    def step(self) -> Step:
        """A step as the schedule runs it, extended to all its microbatches."""
        job = self.job
        axes = axes_of(self.job, self.fit)
        fit = self.fit
        schedule = self.short.schedule
        times = self.stage_times
        hop = axes.pp.send(job.stream / (job.tp if job.sequence_parallel else 1))
        timeline, instant = (simulate(schedule, times, transfer) for transfer in (hop, 0.0))
        busy = max(timeline.busy(rank) for rank in range(job.pp))
        more = (job.microbatches - schedule.microbatches) / schedule.microbatches
        kernels = busy * (1 + more)
        block = block_of(job, axes, Kernels(job, fit), fit)
        both = block.forward + block.backward
        share = job.microbatches * job.model.num_hidden_layers / job.pp
        tensor = share * both.tensor
        context = share * both.context
        stretched = self._stretched(times) * job.microbatches
        data = self._once() + stretched
        update = self._update()
        waits = (timeline.makespan - instant.makespan) * (1 + more)
        whole = kernels + instant.makespan - busy + waits + data - stretched + update + fit.step
        return Step(
            compute=kernels - tensor - context - stretched,
            bubble=instant.makespan - busy,
            tensor=tensor,
            context=context,
            pipeline=waits,
            data=data,
            update=update,
            other=fit.step + whole * straggling(job, fit),
        )

    def _stretched(self, times: Sequence[StageTimes]) -> float:
        """Seconds by which communication makes the passes of one microbatch longer, on the rank
        where that is most."""
        bare = [replace(one, gather_forward=0.0, gather_backward=0.0, reduce=0.0) for one in times]
        longer = [0.0] * self.job.pp
        for rank, one, other in zip(self.short.partition.placement, times, bare, strict=True):
            longer[rank] += sum(one.of(op) - other.of(op) for op in self.short.schedule.passes)
        return max(longer)

    def _once(self) -> float:
        """Visible seconds of what is sent once a step: gradients behind the last backward pass,
        parameters before the next forward pass. A part of what travels under kernels shows as their
        slowdown."""
        job = self.job
        fit = self.fit
        axes = axes_of(self.job, self.fit)
        plan = self.short
        if job.dp * job.cp == 1:
            return 0.0
        strategy = strategy_named(self.config.parallel.data_parallel_sharding_strategy)
        times = self.stage_times
        worst = 0.0
        for rank, layout in enumerate(plan.layouts):
            stages = [times[stage] for stage in plan.partition.stages_of(rank)]
            total = sum(bucket.numel for bucket in layout.buckets)
            messages = []
            done = 0
            for bucket in layout.buckets:
                done += bucket.numel
                if not bucket.kind.trainable:
                    continue
                seconds = axes.shards.gather(bucket.numel * job.traits.gradient_bytes)
                seconds += axes.replicas.reduce(
                    layout.shard_numel(bucket.index) * job.traits.gradient_bytes
                )
                messages.append(
                    (done / total, 0.0 if strategy.reduce_every_microbatch else seconds)
                )
            ends = [(0.0, one.of(Op.BACKWARD)) for one in stages[-1:]]
            if not messages:
                continue
            once = [
                bucket.numel
                for bucket in layout.buckets
                if bucket.kind.trainable and layout.resident(bucket.index)
            ]
            gathers = (
                axes.shards.gather(sum(once) * job.itemsize, len(once))
                if layout.shards > 1
                else 0.0
            )
            under = sum(seconds for _, seconds in messages) + gathers
            late = max(0.0, gathers - sum(one.of(Op.FORWARD) for one in stages))
            worst = max(worst, tail(ends, messages) + late + fit.data_exposed * under)
        return worst

    def _update(self) -> float:
        """Seconds of the update rule on the largest shard, of the norm before it, and of waiting
        for the host."""
        job = self.job
        plan = self.short
        norm = axes_of(job, self.fit).shards.reduce(8.0) if self.config.optimizer.clip_grad else 0.0
        trained = [
            sum(layout.shard_numel(one.index) for one in layout.buckets if one.kind.trainable)
            for layout in plan.layouts
        ]
        here = [owned - away for owned, away in zip(trained, self.away, strict=True)]
        return (
            update_bytes(job) * max(here) / Kernels(job, self.fit).hbm
            + norm
            + max(map(self.host_wait, range(job.pp)))
        )

    @cached_property
    def away(self) -> tuple[float, ...]:
        """Elements that the host updates for each pipeline rank."""
        plans = [self.short.offload(rank) for rank in range(self.job.pp)]
        offload = self.job.offload
        return tuple(
            plan.to_host / offload.down if plan is not None and offload is not None else 0.0
            for plan in plans
        )

    def host_wait(self, rank: int) -> float:
        """Seconds of a step in which a pipeline rank waits for its optimizer on the host."""
        stages = [self.stage_times[stage] for stage in self.short.partition.stages_of(rank)]
        forward, backward = (sum(one.of(op) for one in stages) for op in (Op.FORWARD, Op.BACKWARD))
        return host_wait(self.job, self.fit, self.away[rank], forward, backward)

    @cached_property
    def host_bytes(self) -> int:
        """Memory of the host that the process takes which needs most."""
        return self.short.offloaded()

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.job.total_tokens / self.seconds / self.machine.gpus

    @cached_property
    def timed(self) -> Step:
        """``step``, once."""
        return self.step()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timed.seconds
