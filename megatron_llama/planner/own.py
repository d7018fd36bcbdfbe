"""A configuration of this trainer as the planner sees it: its plans, timed. Every byte and message is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_llama.activations import compute_bytes
from megatron_llama.config import Config
from megatron_llama.layout import shard_count, strategy_named
from megatron_llama.memory import MemoryPlan, state_bytes
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.job import Habits, Job, Machine, Sharding
from megatron_llama.planner.kernels import Kernels, Pass
from megatron_llama.planner.links import axes_of
from megatron_llama.planner.odds import out_of_memory
from megatron_llama.planner.simulate import StageTimes, simulate, tail
from megatron_llama.planner.steps import Step, block_of, straggling, update_bytes
from megatron_llama.schedule import Op
from megatron_llama.traffic import StepTraffic

ENOUGH = 2
"""Microbatches for each pipeline rank after which more of them repeat the same pattern: memory has its peak, a step grows evenly."""


def job_of(config: Config, machine: Machine) -> Job:
    """The work of a step of a resolved configuration."""
    parallel, training = config.parallel, config.training
    tp, pp, cp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    dp = machine.gpus // (tp * pp * cp)
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    sharding: Sharding = "none"
    if strategy.sharded:
        sharding = "parameters" if strategy.by_unit else "gradients" if strategy.reduce_every_microbatch else "optimizer"
    itemsize = compute_bytes(config)
    wire = 2 if parallel.grad_reduce_in_bf16 else max(4, itemsize)
    return Job(
        model=config.model,
        machine=machine,
        habits=Habits(family="torchtitan", gradient_bytes=wire, reduces_every_microbatch=True),
        seq=training.seq_length,
        micro_batch=training.micro_batch_size,
        microbatches=training.global_batch_size // (training.micro_batch_size * dp),
        tp=tp,
        pp=pp,
        vpp=2 if parallel.pipeline_schedule == "zb-v" else parallel.virtual_pipeline_model_parallel_size,
        cp=cp,
        dp=dp,
        sequence_parallel=parallel.sequence_parallel,
        recomputed=_share(config) if parallel.recompute_granularity == "full" else 0.0,
        recomputed_memory=0.5 * _share(config) if parallel.recompute_granularity == "selective" else 0.0,
        ends_counted=parallel.account_for_loss_in_pipeline_split,
        bubble={"zb-h1": 1 / 3, "zb-v": 1 / 3}.get(parallel.pipeline_schedule, 1.0),
        sharding=sharding,
        shards=shard_count(parallel, dp * cp),
        precision="bf16",
        itemsize=itemsize,
    )


def _share(config: Config) -> float:
    """Of the blocks that recompute."""
    wanted, parallel = config.parallel.recompute_num_layers, config.parallel
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    return min(1.0, int(wanted) * stages / config.model.num_hidden_layers) if wanted.isdecimal() else 1.0


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
        job, training = self.job, self.config.training
        few = min(job.microbatches, ENOUGH * job.pp)
        return replace(self.config, training=replace(training, global_batch_size=few * job.micro_batch * job.dp))

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
        plan, granularity = self.short, self.config.parallel.recompute_granularity
        state = state_bytes(self.config, plan.layouts[rank])
        parts = {
            "weights": state["parameters"] + state["parameter shards"],
            "gradients": state["gradients"],
            "optimizer": state["master weights"] + state["moments"],
        }
        logits = plan.logits(rank)
        return {**parts, "activations": plan.activations(rank, granularity, self.recomputing) - logits, "logits": logits}

    @cached_property
    def fullest(self) -> dict[str, int]:
        """Memory of the rank that needs most."""
        return max((self.memory(rank) for rank in range(self.job.pp)), key=lambda parts: sum(parts.values()))

    @cached_property
    def odds(self) -> float:
        """Probability of running out of memory."""
        return out_of_memory(sum(self.fullest.values()), self.machine.gpu.memory)

    @cached_property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """Of one microbatch, at every stage, with the bytes that its rank sends for one."""
        job, plan, axes = self.job, self.short, axes_of(self.job, self.fit)
        kernels = Kernels(job, self.fit)
        pure = replace(job, recomputed=0.0, recomputed_memory=0.0)
        block, head = block_of(pure, axes, kernels, self.fit), kernels.head()
        again = replace(job, recomputed=float(job.recomputed > 0), recomputed_memory=0.5 * (job.recomputed_memory > 0))
        costly = block_of(again, axes, kernels, self.fit).backward
        weight = Pass(matmul=block.forward.matmul, launch=block.forward.launch).seconds
        times = []
        for stage, layers in enumerate(plan.partition.layers):
            count, recompute = len(layers), min(self.recomputing, len(layers))
            last = stage == plan.partition.stages - 1
            ends = (stage == 0) * 0.5 * axes.tp.reduce(job.stream)
            backward = (count - recompute) * block.backward.seconds + recompute * costly.seconds - count * weight
            gathers, reductions = self._beside(plan.partition.placement[stage])
            times.append(
                StageTimes(
                    forward=count * block.forward.seconds + last * head.seconds + ends,
                    backward_input=backward + last * head.seconds,
                    backward_weight=count * weight + last * head.seconds,
                    gather_forward=gathers / 2,
                    gather_backward=gathers / 2,
                    reduce=reductions,
                    slowdown=self.fit.parameters_exposed,
                )
            )
        return tuple(times)

    def _beside(self, rank: int) -> tuple[float, float]:
        """Seconds of gathers and of reductions for one microbatch at one stage of a rank; what is sent once a step is left out."""
        config, plan = self.config, self.short
        strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
        if not strategy.reduce_every_microbatch or self.job.dp * self.job.cp == 1:
            return 0.0, 0.0
        axes, traffic, layout = axes_of(self.job, self.fit), self.traffic[rank], plan.layouts[rank]
        passes = plan.schedule.microbatches * plan.schedule.virtual
        once = all(layout.resident(bucket.index) for bucket in layout.buckets)
        gathers = 0.0 if once else axes.shards.gather(traffic.gather_bytes, traffic.gathers) / passes
        return gathers, axes.shards.gather(traffic.reduction_bytes, traffic.reductions) / passes

    def step(self) -> Step:
        """A step as the schedule runs it, extended to all its microbatches."""
        job, axes, fit = self.job, axes_of(self.job, self.fit), self.fit
        schedule, times = self.short.schedule, self.stage_times
        hop = axes.pp.send(job.stream / (job.tp if job.sequence_parallel else 1))
        timeline, instant = (simulate(schedule, times, transfer) for transfer in (hop, 0.0))
        busy = max(timeline.busy(rank) for rank in range(job.pp))
        more = (job.microbatches - schedule.microbatches) / schedule.microbatches
        kernels = busy * (1 + more)
        block = block_of(job, axes, Kernels(job, fit), fit)
        both, share = block.forward + block.backward, job.microbatches * job.model.num_hidden_layers / job.pp
        tensor, context = share * both.tensor, share * both.context
        stretched = self._stretched(times) * job.microbatches
        data, update = self._once() + stretched, self._update()
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
        """Seconds by which communication makes the passes of one microbatch longer, on the rank where that is most."""
        bare = [replace(one, gather_forward=0.0, gather_backward=0.0, reduce=0.0) for one in times]
        longer = [0.0] * self.job.pp
        for rank, one, other in zip(self.short.partition.placement, times, bare, strict=True):
            longer[rank] += sum(one.of(op) - other.of(op) for op in self.short.schedule.passes)
        return max(longer)

    def _once(self) -> float:
        """Visible seconds of what is sent once a step: gradients behind the last backward pass, parameters before the next forward pass.
        A part of what travels under kernels shows as their slowdown."""
        job, fit, axes, plan = self.job, self.fit, axes_of(self.job, self.fit), self.short
        if job.dp * job.cp == 1:
            return 0.0
        strategy, times = strategy_named(self.config.parallel.data_parallel_sharding_strategy), self.stage_times
        worst = 0.0
        for rank, layout in enumerate(plan.layouts):
            stages = [times[stage] for stage in plan.partition.stages_of(rank)]
            total = sum(bucket.numel for bucket in layout.buckets)
            messages, done = [], 0
            for bucket in layout.buckets:
                done += bucket.numel
                seconds = axes.shards.gather(bucket.numel * job.habits.gradient_bytes)
                seconds += axes.replicas.reduce(layout.shard_numel(bucket.index) * job.habits.gradient_bytes)
                messages.append((done / total, 0.0 if strategy.reduce_every_microbatch else seconds))
            ends = [(0.0, one.of(Op.BACKWARD)) for one in stages[-1:]]
            resident = sum(layout.buckets[bucket].numel for bucket in range(len(layout.buckets)) if layout.resident(bucket))
            gathers = axes.shards.gather(resident * job.itemsize, len(layout.buckets)) if layout.shards > 1 else 0.0
            under = sum(seconds for _, seconds in messages) + gathers
            late = max(0.0, gathers - sum(one.of(Op.FORWARD) for one in stages))
            worst = max(worst, tail(ends, messages) + late + fit.data_exposed * under)
        return worst

    def _update(self) -> float:
        """Seconds of the update rule on the largest shard, and of the norm before it."""
        job, plan = self.job, self.short
        owned = max(sum(layout.shard_numel(bucket.index) for bucket in layout.buckets) for layout in plan.layouts)
        norm = axes_of(job, self.fit).shards.reduce(8.0) if self.config.optimizer.clip_grad else 0.0
        return update_bytes(job) * owned / Kernels(job, self.fit).hbm + norm

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
