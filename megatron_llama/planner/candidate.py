"""A configuration of this trainer with the times of its plans. All bytes and messages are read
from the plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import Bucket, BucketPlan, strategy_named
from megatron_llama.model.plan.fp8 import fp8_layers
from megatron_llama.pipeline.plan.traffic import StepTraffic
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.kernels import Kernels, PassTime
from megatron_llama.planner.links import RankGroup, RankGroups, rank_groups
from megatron_llama.planner.oom_probability import out_of_memory
from megatron_llama.planner.simulate import StageTimes, simulate, tail
from megatron_llama.planner.steps import (
    BlockTime,
    StepTime,
    block_time,
    expert_sums,
    host_wait,
    straggling,
    update_bytes,
    update_of_codes,
)
from megatron_llama.planner.training_job import Machine, TrainingJob, job_of
from megatron_llama.schedule import SCHEDULES, Op
from megatron_llama.train.setup.memory import MemoryPlan

ENOUGH = 2
"""Microbatches for each pipeline rank after which the pattern repeats: memory has reached its peak,
and the time of a step grows linearly."""


@dataclass(frozen=True)
class Candidate:
    """A configuration on a machine. ``config`` is resolved and valid for the machine's GPUs."""

    config: Config
    machine: Machine
    fit: Coefficients

    @cached_property
    def job(self) -> TrainingJob:
        """The work of a step."""
        return job_of(self.config, self.machine)

    @cached_property
    def groups(self) -> RankGroups:
        """The groups of ranks that communicate."""
        return rank_groups(self.job, self.fit)

    @cached_property
    def few(self) -> Config:
        """The configuration with just enough microbatches to show the pattern."""
        job = self.job
        everything = SCHEDULES[self.config.parallel.pipeline_schedule].keeps_every_microbatch
        few = job.microbatches if everything else min(job.microbatches, ENOUGH * job.pp)
        batch = few * job.micro_batch * job.dp
        return replace(self.config, training=replace(self.config.training, global_batch_size=batch))

    @cached_property
    def short(self) -> MemoryPlan:
        """The plans of ``few``."""
        return MemoryPlan(self.few, self.machine.gpus)

    @cached_property
    def traffic(self) -> tuple[StepTraffic, ...]:
        """Traffic of each pipeline rank in a step of ``few``."""
        return tuple(self.short.traffic(rank) for rank in range(self.job.pp))

    @cached_property
    def recomputing(self) -> int:
        """Blocks of each stage that recompute."""
        return (
            self.short.recompute_layers()
            if self.config.parallel.recompute_granularity != "none"
            else 0
        )

    def memory(self, rank: int) -> dict[str, int]:
        """Return the bytes of a pipeline rank by component, at the fullest moment."""
        plan = self.short
        granularity = self.config.parallel.recompute_granularity
        state = plan.state_by_component(rank)
        logits = plan.logits(rank)
        return {
            "weights": state["parameters"]
            + state["parameter shards"]
            + state.get("weight codes in FP8", 0),
            "gradients": state["gradients"] + plan.staging(rank),
            "optimizer": state["master weights"]
            + state["moments"]
            + state["scalars"]
            + state.get("update buffers", 0)
            + state.get("hot columns", 0)
            + state.get("column numbers", 0),
            "activations": plan.activations(rank, granularity, self.recomputing) - logits,
            "logits": logits,
        }

    @cached_property
    def fullest(self) -> dict[str, int]:
        """Memory of the rank that needs most."""
        every = (self.memory(rank) for rank in range(self.job.pp))
        return max(every, key=lambda parts: sum(parts.values()))

    @cached_property
    def needed(self) -> int:
        """Bytes of the rank that needs most."""
        return sum(self.fullest.values())

    @cached_property
    def oom_probability(self) -> float:
        """Probability of running out of memory, the device's or the host's."""
        gpu = self.machine.gpu
        device = out_of_memory(self.needed, gpu.memory)
        host = out_of_memory(self.host_bytes, gpu.host_memory) if self.host_bytes else 0.0
        return max(device, host)

    @cached_property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """Seconds of one microbatch's passes at each stage, and of the overlapped messages."""
        job = self.job
        partition = self.short.partition
        head = Kernels(job, self.fit).head().seconds
        blocks: dict[tuple[float, ...], tuple[BlockTime, float, float]] = {}
        times = []
        for stage, layers in enumerate(partition.layers):
            count = len(layers)
            shares = self._narrow(layers), *self._sparse(layers)
            if shares not in blocks:
                narrow, sparse, both = shares
                own = replace(job, narrow=narrow, sparse=sparse, narrow_experts=both)
                blocks[shares] = self._blocks(own)
            block, recomputed, weight = blocks[shares]
            recompute = min(self.recomputing, count)
            last = stage == partition.stages - 1
            embedding = (stage == 0) * 0.5 * self.groups.tp.reduce(job.stream)
            backward = (
                (count - recompute) * block.backward.seconds
                + recompute * recomputed
                - count * weight
            )
            head_trained = last and not job.trained.head_frozen
            gathers, reductions = self._data_times(partition.placement[stage])
            times.append(
                StageTimes(
                    forward=count * block.forward.seconds + last * head + embedding,
                    backward_input=backward + last * head,
                    backward_weight=count * weight + head_trained * head,
                    gather_forward=gathers / 2,
                    gather_backward=gathers / 2,
                    reduce=reductions,
                    slowdown=self.fit.parameters_exposed,
                )
            )
        return tuple(times)

    def _narrow(self, layers: range) -> float:
        """Return the share of a stage's blocks whose products are in the job's precision."""
        if self.config.training.fp8 == "none" or not layers:
            return self.job.narrow
        return sum(layer in fp8_layers(self.config) for layer in layers) / len(layers)

    def _sparse(self, layers: range) -> tuple[float, float]:
        """Return the share of a stage's blocks that have experts, and of these the share whose
        products are in the job's precision."""
        if not self.config.model.num_experts or not layers:
            return self.job.sparse, self.job.narrow_experts
        from megatron_llama.planner.expert_work import sparse_shares  # of few models

        return sparse_shares(self.config, layers)

    def _blocks(self, job: TrainingJob) -> tuple[BlockTime, float, float]:
        """Return the time of a block that recomputes nothing, and the seconds of the backward pass
        of one that recomputes and of the weight gradients."""
        kernels = Kernels(job, self.fit)
        pure = replace(job, recomputed=0.0, selective=0.0)
        block = block_time(pure, self.groups, kernels, self.fit)
        again = replace(
            job, recomputed=float(job.recomputed > 0), selective=float(job.selective > 0)
        )
        recomputed = block_time(again, self.groups, kernels, self.fit).backward.seconds
        weight = PassTime(matmul=kernels.weight_gradients(), launch=block.forward.launch).seconds
        return block, recomputed, weight

    def _data_times(self, rank: int) -> tuple[float, float]:
        """Return seconds of gathers and of reductions for one microbatch at one stage of a rank,
        without messages that are sent once a step."""
        plan = self.short
        strategy = strategy_named(self.config.parallel.data_parallel_sharding_strategy)
        if not strategy.reduce_every_microbatch or self.job.dp * self.job.cp == 1:
            return 0.0, 0.0
        layout = plan.bucket_plans[rank]
        passes = plan.schedule.microbatches * plan.schedule.virtual
        once = all(layout.has_own_slot(bucket.index) for bucket in layout.buckets)
        gathers = reductions = 0.0
        for shards, traffic in self._traffic_by_group(rank):
            gathers += 0.0 if once else shards.gather(traffic.gather_bytes, traffic.gathers)
            reductions += shards.gather(traffic.reduction_bytes, traffic.reductions)
        return gathers / passes, reductions / passes

    def _traffic_by_group(self, rank: int) -> Iterator[tuple[RankGroup, StepTraffic]]:
        """Yield what travels among the ranks that share parameters, and among those that share the
        same experts."""
        traffic = self.traffic[rank]
        yield self.groups.shards, traffic
        if traffic.experts is not None:
            yield self.groups.expert_shards, traffic.experts

    @cached_property
    def hop(self) -> float:
        """Seconds of a message between neighbouring stages."""
        return self.groups.pp.send(self.job.stage_message)

    @cached_property
    def step_time(self) -> StepTime:
        """The simulated step of ``few``, extended to all microbatches."""
        job = self.job
        fit = self.fit
        schedule = self.short.schedule
        timeline = simulate(schedule, self.stage_times, self.hop)
        instant = simulate(schedule, self.stage_times, 0.0)
        busy = max(timeline.busy(rank) for rank in range(job.pp))
        more = (job.microbatches - schedule.microbatches) / schedule.microbatches
        kernels = busy * (1 + more)
        both = block_time(job, self.groups, Kernels(job, fit), fit).both
        blocks = job.microbatches * job.model.num_hidden_layers / job.pp
        tensor = blocks * both.tensor
        context = blocks * both.context
        expert = blocks * both.expert
        summed = expert_sums(job, self.groups)
        stretched = self.stretched * job.microbatches
        data = self._once_a_step() + stretched
        update = self._update()
        waits = (timeline.makespan - instant.makespan) * (1 + more)
        once = data - stretched + summed + update + fit.step
        whole = kernels + instant.makespan - busy + waits + once
        return StepTime(
            compute=kernels - tensor - context - expert - stretched,
            bubble=instant.makespan - busy,
            tensor=tensor + summed,
            context=context,
            pipeline=waits,
            data=data,
            expert=expert,
            update=update,
            other=fit.step + whole * straggling(job, fit),
        )

    @cached_property
    def stretched(self) -> float:
        """Seconds by which communication prolongs the passes of one microbatch, on the rank with
        the largest value."""
        longer = [0.0] * self.job.pp
        for rank, times in zip(self.short.partition.placement, self.stage_times, strict=True):
            alone = times.alone
            longer[rank] += sum(times.of(op) - alone.of(op) for op in self.short.schedule.passes)
        return max(longer)

    def _once_a_step(self) -> float:
        """Return exposed seconds of messages sent once a step: gradients after the last backward
        pass, parameters before the next forward pass. Messages during kernels slow these down, so
        a part of their time is exposed too."""
        if self.job.dp * self.job.cp == 1:
            return 0.0
        worst = 0.0
        for rank, layout in enumerate(self.short.bucket_plans):
            if any(bucket.kind.trainable for bucket in layout.buckets):
                stages = self.short.partition.stages_of(rank)
                times = [self.stage_times[stage] for stage in stages]
                worst = max(worst, self._once_on_rank(layout, times))
        return worst

    def _once_on_rank(self, layout: BucketPlan, times: Sequence[StageTimes]) -> float:
        job = self.job
        strategy = strategy_named(self.config.parallel.data_parallel_sharding_strategy)
        total = sum(bucket.numel for bucket in layout.buckets)
        wire = job.traits.gradient_bytes
        # Each reduction, with the share of the last backward pass after which it can start.
        messages = []
        done = 0
        for bucket in layout.buckets:
            done += bucket.numel
            if bucket.kind.trainable:
                shards, replicas = self._groups_of(bucket)
                seconds = shards.gather(bucket.numel * wire)
                seconds += replicas.reduce(layout.shard_numel(bucket.index) * wire)
                messages.append(
                    (done / total, 0.0 if strategy.reduce_every_microbatch else seconds)
                )
        once: dict[RankGroup, list[int]] = {}
        for bucket in layout.buckets:
            if bucket.kind.trainable and layout.has_own_slot(bucket.index):
                once.setdefault(self._groups_of(bucket)[0], []).append(bucket.numel)
        gathers = 0.0
        if layout.shards > 1:
            gathers = sum(
                shards.gather(sum(numels) * job.itemsize, len(numels))
                for shards, numels in once.items()
            )
        hidden = sum(seconds for _, seconds in messages) + gathers
        late = max(0.0, gathers - sum(stage_times.of(Op.FORWARD) for stage_times in times))
        ends = [(0.0, times[-1].of(Op.BACKWARD))]
        return tail(ends, messages) + late + self.fit.data_exposed * hidden

    def _groups_of(self, bucket: Bucket) -> tuple[RankGroup, RankGroup]:
        """Return the ranks that divide a bucket, and those that have the same share."""
        groups = self.groups
        if bucket.kind.ep > 1:
            return groups.expert_shards, groups.expert_replicas
        return groups.shards, groups.replicas

    def _update(self) -> float:
        """Return seconds of the update rule on the largest shard, of the norm before it, and of
        waiting for the host."""
        norm = self.groups.shards.reduce(8.0) if self.config.optimizer.clip_grad else 0.0
        elements = []
        for layout, away in zip(self.short.bucket_plans, self.away, strict=True):
            trained = [bucket for bucket in layout.buckets if bucket.kind.trainable]
            elements.append(sum(layout.shard_numel(bucket.index) for bucket in trained) - away)
        kernels = Kernels(self.job, self.fit)
        update = update_bytes(self.job) * max(elements) / kernels.hbm
        update += update_of_codes(self.job, self.groups, kernels)
        return update + norm + max(map(self.host_wait, range(self.job.pp)))

    @cached_property
    def away(self) -> tuple[float, ...]:
        """Number of elements that the host updates, for each pipeline rank."""
        plans = [self.short.offload(rank) for rank in range(self.job.pp)]
        offload = self.job.offload
        return tuple(
            plan.to_host / offload.down if plan is not None and offload is not None else 0.0
            for plan in plans
        )

    def host_wait(self, rank: int) -> float:
        """Return the seconds of a step in which a pipeline rank waits for its optimizer on the
        host."""
        stages = [self.stage_times[stage] for stage in self.short.partition.stages_of(rank)]
        forward = sum(times.of(Op.FORWARD) for times in stages)
        backward = sum(times.of(Op.BACKWARD) for times in stages)
        return host_wait(self.job, self.fit, self.away[rank], forward, backward)

    @cached_property
    def host_bytes(self) -> int:
        """Host memory in bytes of the process that needs most."""
        return self.short.offloaded()

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.job.total_tokens / self.seconds / self.machine.gpus

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step_time.seconds
