"""The layouts that are recorded, and how one rank of a layout runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch

from megatron_llama.checkpoint.background import SharedBuffers
from megatron_llama.checkpoint.chunks import Region, regions
from megatron_llama.checkpoint.columns import column_pieces
from megatron_llama.checkpoint.history import NO_HISTORY
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import (
    Config,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.data.loader import Batch, BatchLoader
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.replicas import check_replicas
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.metrics.log import MetricLog, StepRecord
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer, compute_dtype, runtime_class
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.pipeline.scoring import predict_tokens
from megatron_llama.train.run.bad_steps import BadSteps
from megatron_llama.train.run.block_graphs import BlockGraphs
from megatron_llama.train.run.callbacks import Step
from megatron_llama.train.run.course import Course
from megatron_llama.train.run.prefetch import Interrupts, Prefetcher
from megatron_llama.train.run.progress import Progress
from megatron_llama.train.run.timeline_recorder import Notes
from megatron_llama.train.setup.resolve import problems, resolve
from tools.stream_check.events import Event, Site
from tools.stream_check.rank import name_buffers, recorded
from tools.stream_check.recording import DEVICE, Recording, RecordingError
from tools.stream_check.user_module import user_layouts

_MODEL = ModelConfig(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    initializer_range=0.05,
)
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_LR = 1e-3
_SEQ_LENGTH = 16


@dataclass(frozen=True)
class Layout:
    """A run, and the rank of it that is recorded."""

    config: Config
    world_size: int
    rank: int = 0
    steps: int = 3
    between: frozenset[str] = field(default_factory=frozenset)
    """What happens after the second step: ``evaluate``, ``replicas`` (they are compared),
    ``texts`` (a token is predicted), ``rollback``, ``save`` (the copies of an asynchronous one) and
    ``timeline`` (one is recorded during the third step)."""
    documents: bool = False
    grows: bool = False
    """The first step has half of the microbatches."""
    end: Literal["settled", "updated", "reduced"] = "settled"
    """How far the last step comes before everything is closed and freed: until nothing is in
    flight, as at the end of a run; or as after an error right behind the update, or before it."""
    blocking: bool = False
    """The offload waits at once."""


def record(layout: Layout, skip: Site | None = None) -> list[Event]:
    """Return what the rank does. What is called at ``skip`` to wait or to record an event does
    nothing.

    Raises RecordingError for a layout that no run may have."""
    return recorded(partial(train, layout), layout.rank, layout.world_size, skip)


def train(layout: Layout, recording: Recording) -> None:
    """Do what the rank does. Raises RecordingError for a layout that no run may have."""
    wrong = problems(layout.config, layout.world_size)
    if wrong:
        raise RecordingError("; ".join(wrong))
    _Run(layout, recording).train()


class _Run:
    """The training loop of one rank, without files, logs and samples."""

    def __init__(self, layout: Layout, recording: Recording) -> None:
        self._layout = layout
        self._recording = recording
        self._config = config = resolve(layout.config, layout.world_size)
        self._weights = InitialWeights(1, config.model.initializer_range)
        self._mesh = build_mesh(
            config, rank=layout.rank, world_size=layout.world_size, device=DEVICE
        )

    def train(self) -> None:
        """Train, do what belongs between steps, and name the buffers."""
        config = self._config
        mesh = self._mesh
        clip = config.optimizer.clip_grad
        stages = build_stages(config, mesh)
        with closing(
            build_optimizer(config, stages.values(), mesh, blocking=self._layout.blocking)
        ) as optimizer:
            optimizer.load_weights(self._weights)
            runtime = runtime_class(config)(
                stages, optimizer, mesh, config, dtype=compute_dtype(config)
            )
            log = cast(MetricLog, _NoLog())
            bad_steps = BadSteps(config, mesh, log, NO_HISTORY)
            course = Course(TrainState(0, 0), bad_steps.is_last)
            progress = Progress(config, mesh, log, bad_steps, course)
            loader = cast(BatchLoader, _Loader(self._batches, grows=self._layout.grows))
            prefetcher = Prefetcher(
                loader, mesh.world, Interrupts(), first_sample=0, device=mesh.device
            )
            notes = Notes(mesh.recorder, mesh.device)
            graphs = None
            if config.training.cuda_graph_scope == "block":
                graphs = BlockGraphs(stages, optimizer, mesh)
            for iteration in range(1, self._layout.steps + 1):
                batches = prefetcher.take(next_sample=0)
                optimizer.announce_step(_LR, clip=clip)
                loss = runtime.step(batches)
                last = iteration == self._layout.steps
                if last and self._layout.end == "reduced":
                    break
                update = optimizer.step(_LR, clip=clip, skip_update=bad_steps.skip_update(loss))
                state = TrainState(iteration, 0)
                step = Step.of(state, _LR, loss, update, {}, batches)
                if graphs is not None:
                    graphs.begin()
                progress.record_step(state, step, last=last)
                prefetcher.agreed_request()
                if iteration == 2:
                    progress.check_last_step()
                    self._between(runtime, optimizer, prefetcher, notes)
            if "timeline" in self._layout.between:
                notes.finish()
            if self._layout.end == "settled":
                optimizer.settle()
            for number, pair in enumerate(prefetcher._upload._pairs):
                self._recording.name(pair.host.memory, f"upload buffer {number} on the host")
                self._recording.name(pair.device.memory, f"upload buffer {number} on the device")
            name_buffers(self._recording, optimizer)

    def _between(
        self,
        runtime: PipelineRuntime,
        optimizer: OverlappedDistributedOptimizer,
        prefetcher: Prefetcher,
        notes: Notes,
    ) -> None:
        wanted = self._layout.between
        if "replicas" in wanted:
            check_replicas(optimizer, self._mesh, 2)
        if "evaluate" in wanted:
            loss, _ = runtime.evaluate(self._batches())
            float(loss)
        if "texts" in wanted:
            ids = self._batches()[0].tokens
            batch = Batch(ids.to(self._mesh.device), ids.to(self._mesh.device))
            predicted = predict_tokens(runtime, batch)
            predicted.cpu().tolist()
        if "rollback" in wanted:
            # As after a bad step, with the first weights as the checkpoint to which it returns.
            optimizer.reset()
            optimizer.load_weights(self._weights)
            prefetcher.restart(0)
        if "save" in wanted:
            optimizer.settle()
            pieces = chain(shard_pieces(optimizer), column_pieces(optimizer, self._mesh))
            primary = (piece for piece in pieces if piece.primary)
            self._copy_for_save(tuple(part for one in regions(primary) for part in one.split()))
        if "timeline" in wanted:
            devices.synchronize(self._mesh.device)
            notes.begin()

    def _copy_for_save(self, parts: Sequence[Region]) -> None:
        memory = os.memfd_create("checkpoint")
        with ExitStack() as stack:
            stack.callback(os.close, memory)
            buffers = SharedBuffers(memory, parts)
            for device in {part.tensor.device for part in parts}:
                buffers.pin(device)
            buffers.fill(0, parts)
            # The writing process reads them as soon as it is told.
            for place in buffers.slots[0]:
                place.tensor.tolist()

    def _batches(self) -> list[Batch]:
        training = self._config.training
        count = training.global_batch_size // (training.micro_batch_size * self._mesh.data_size)
        shape = training.seq_length, training.micro_batch_size
        ids = torch.arange(shape[0] * shape[1]).view(shape) % self._config.model.vocab_size
        found = [Batch(ids.clone(), ids.clone()) for _ in range(count)]
        if self._layout.documents:
            place = torch.arange(shape[0]).unsqueeze(1).expand(shape)
            half = shape[0] // 2
            found = [
                replace(
                    batch,
                    loss_mask=torch.ones(shape),
                    position_ids=place % half,
                    document_ids=(place // half).to(torch.int32),
                )
                for batch in found
            ]
        return found


class _Loader:
    """Reads the same batches for every step; one that grows reads half of them for the first."""

    def __init__(self, batches: Callable[[], list[Batch]], *, grows: bool) -> None:
        self._batches = batches
        self._grows = grows

    def microbatches(self, sample: int) -> list[Batch]:
        """Return the microbatches of a step."""
        batches = self._batches()
        if self._grows:
            self._grows = False
            return batches[: len(batches) // 2]
        return batches


class _NoLog:
    """Takes the lines of a run, and writes none."""

    def advance(self) -> None:
        """Do nothing."""

    def write(self, record: StepRecord) -> None:
        """Do nothing."""


def _layout(
    *,
    dp: int = 2,
    rank: int = 0,
    microbatches: int = 2,
    layers: int = 2,
    clip: float = 1.0,
    optimizer: str = "adam",
    dtype: str = "bf16",
    tied: bool = False,
    recompute: str = "none",
    lora: int = 0,
    window: int = 0,
    freeze: tuple[str, ...] = (),
    offload: OffloadConfig | None = None,
    zenflow: ZenFlowConfig | None = None,
    reduce_bf16: bool = False,
    sums_wide: bool = False,
    between: Sequence[str] = (),
    documents: bool = False,
    grows: bool = False,
    log: LogConfig | None = None,
    end: Literal["settled", "updated", "reduced"] = "settled",
    blocking: bool = False,
    steps: int = 3,
    **parallel: Any,
) -> Layout:
    """A layout of the tiny model, with options that differ from those of one that is sharded over
    two data-parallel ranks."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    world_size = dp
    for size in sizes:
        world_size *= parallel.get(size, 1)
    config = Config(
        model=replace(
            _MODEL,
            model_type="mistral" if window else "llama",
            num_hidden_layers=layers,
            tie_word_embeddings=tied,
            sliding_window=window,
        ),
        parallel=ParallelConfig(
            reduce_bucket_size=4000,
            recompute_granularity=cast(Any, recompute),
            grad_reduce_in_bf16=reduce_bf16,
            ddp_reduce_scatter_with_fp32_accumulation=sums_wide,
            **parallel,
        ),
        training=TrainingConfig(
            bf16=dtype == "bf16",
            fp16=dtype == "fp16",
            initial_loss_scale=1024.0,
            seq_length=_SEQ_LENGTH,
            micro_batch_size=1,
            global_batch_size=dp * microbatches,
            train_iters=10,
        ),
        optimizer=OptimizerConfig(
            optimizer=cast(Any, optimizer),
            lr=_LR,
            lr_decay_style="constant",  # the rate changes no order
            clip_grad=clip,
            freeze=freeze,
        ),
        offload=offload or OffloadConfig(),
        zenflow=zenflow or ZenFlowConfig(),
        lora=LoraConfig(lora_rank=lora),
        log=log or LogConfig(),
    )
    return Layout(
        config,
        world_size,
        rank=rank,
        steps=steps,
        between=frozenset(between),
        documents=documents,
        grows=grows,
        end=end,
        blocking=blocking,
    )


def _data_parallel() -> dict[str, Layout]:
    """Every strategy with its slots and replicas, clipped, and not: then buckets are updated during
    backward."""
    found = {}
    for strategy in _STRATEGIES:
        make = partial(_layout, data_parallel_sharding_strategy=strategy)
        found[strategy] = make()
        found[f"{strategy}, no clipping"] = make(clip=0.0)
        found[f"{strategy}, one microbatch"] = make(microbatches=1)
        found[f"{strategy}, reduced in bf16"] = make(reduce_bf16=True)
        found[f"{strategy}, reduced in bf16, summed in fp32"] = make(
            reduce_bf16=True, sums_wide=True
        )
        found[f"{strategy}, fp32, no clipping"] = make(dtype="fp32", clip=0.0)
    for strategy in ("optim_grads", "optim_grads_params"):
        make = partial(_layout, data_parallel_sharding_strategy=strategy, layers=4)
        for slots in (1, 2, 4):
            found[f"{strategy}, {slots} gradient slots"] = make(grad_slots=slots)
            found[f"{strategy}, {slots} gradient slots, no clipping"] = make(
                grad_slots=slots, clip=0.0
            )
    for room in ("1", "2", "3", "all"):
        for clip in (1.0, 0.0):
            words = f"optim_grads_params, {room} parameter slots"
            found[words + ("" if clip else ", no clipping")] = _layout(
                data_parallel_sharding_strategy="optim_grads_params",
                param_slots=room,
                layers=4,
                clip=clip,
            )
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        found[f"{strategy}, shards of one rank"] = _layout(
            data_parallel_sharding_strategy=strategy, data_parallel_shard_size=1
        )
        found[f"{strategy}, two replicas"] = _layout(
            data_parallel_sharding_strategy=strategy, dp=4, data_parallel_shard_size=2, rank=3
        )
        found[f"{strategy}, two replicas, reduced in bf16, no clipping"] = _layout(
            data_parallel_sharding_strategy=strategy,
            dp=4,
            data_parallel_shard_size=2,
            reduce_bf16=True,
            clip=0.0,
        )
        found[f"{strategy}, two replicas, reduced in bf16, summed in fp32"] = _layout(
            data_parallel_sharding_strategy=strategy,
            dp=4,
            data_parallel_shard_size=2,
            reduce_bf16=True,
            sums_wide=True,
        )
    found["limited prefetch"] = _layout(
        data_parallel_sharding_strategy="optim_grads_params", layers=4, prefetch_bytes=20_000
    )
    found["one process"] = _layout(dp=1)
    return found


def _pipelines() -> dict[str, Layout]:
    """Every schedule on four pipeline ranks, on the first, a middle and the last one."""
    found = {}
    for schedule, virtual in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("zb-h1", 1),
        ("interleaved", 2),
        ("zb-v", 2),
    ):
        make = partial(
            _layout,
            pipeline_model_parallel_size=4,
            pipeline_schedule=schedule,
            virtual_pipeline_model_parallel_size=virtual,
            layers=4 * virtual,
        )
        for place in (0, 1, 3):
            for strategy in ("optim", "optim_grads_params"):
                found[f"{schedule}, pipeline rank {place}, {strategy}"] = make(
                    rank=2 * place, microbatches=4, data_parallel_sharding_strategy=strategy
                )
        found[f"{schedule}, no clipping, evaluation"] = make(
            rank=4, microbatches=4, clip=0.0, between=["evaluate"]
        )
        for place in (0, 3):
            found[f"{schedule}, tied, pipeline rank {place}"] = make(
                rank=2 * place, microbatches=4, tied=True
            )
    return found


def _models() -> dict[str, Layout]:
    """Other axes, and what else changes a forward or backward pass."""
    found = {}
    sharded = "optim_grads_params"
    for clip in (1.0, 0.0):
        words = "" if clip else ", no clipping"
        make = partial(_layout, clip=clip)
        found[f"tp{words}"] = make(tensor_model_parallel_size=2)
        found[f"sp{words}"] = make(tensor_model_parallel_size=2, sequence_parallel=True)
        found[f"sp with shared heads{words}"] = make(
            tensor_model_parallel_size=4, sequence_parallel=True
        )
        found[f"sp, tied, {sharded}{words}"] = make(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            tied=True,
            data_parallel_sharding_strategy=sharded,
        )
        for pieces in ("2", "3"):
            cut = partial(make, tensor_model_parallel_size=2, tp_comm_overlap=pieces)
            found[f"tp in {pieces} pieces{words}"] = cut()
            found[f"sp in {pieces} pieces{words}"] = cut(sequence_parallel=True)
            found[f"sp in {pieces} pieces, recompute full, lora{words}"] = cut(
                sequence_parallel=True, recompute="full", lora=4
            )
        found[f"cp{words}"] = make(context_parallel_size=2)
        found[f"cp in a ring{words}"] = make(context_parallel_size=2, cp_comm_type="ring")
        found[f"cp by heads{words}"] = make(context_parallel_size=2, cp_comm_type="a2a")
        found[f"lora{words}"] = make(lora=4)
        found[f"lora, {sharded}{words}"] = make(lora=4, data_parallel_sharding_strategy=sharded)
        for granularity in ("selective", "full"):
            found[f"recompute {granularity}{words}"] = make(recompute=granularity)
            found[f"recompute {granularity}, {sharded}{words}"] = make(
                recompute=granularity, data_parallel_sharding_strategy=sharded
            )
        found[f"fp16{words}"] = make(dtype="fp16")
        found[f"fp32{words}"] = make(dtype="fp32")
        found[f"tied{words}"] = make(tied=True)
        found[f"documents{words}"] = make(documents=True)
        found[f"frozen embedding{words}"] = make(freeze=("*embed_tokens*",))
    found["cp in a ring, sp, documents"] = _layout(
        context_parallel_size=2,
        cp_comm_type="ring",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        documents=True,
    )
    found["cp in a ring, 1f1b"] = _layout(
        dp=1, context_parallel_size=2, cp_comm_type="ring", pipeline_model_parallel_size=2, rank=2
    )
    found["cp in a ring over four"] = _layout(
        dp=1, context_parallel_size=4, cp_comm_type="ring", rank=1
    )
    found["cp by heads, sp, documents"] = _layout(
        context_parallel_size=2,
        cp_comm_type="a2a",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        documents=True,
    )
    found["cp by heads, windows, recompute full"] = _layout(
        context_parallel_size=2, cp_comm_type="a2a", window=3, recompute="full"
    )
    found["cp by heads of pairs, in a ring"] = _layout(
        dp=1,
        context_parallel_size=4,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(2, 2),
        pipeline_model_parallel_size=2,
        rank=5,
    )
    found["windows, documents"] = _layout(window=3, documents=True)
    found["cp, windows"] = _layout(context_parallel_size=2, window=3)
    found["cp over four, windows, documents"] = _layout(
        dp=1, context_parallel_size=4, window=3, documents=True, rank=1
    )
    found["zb-h1, sp in 2 pieces"] = _layout(
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        tp_comm_overlap="2",
        pipeline_schedule="zb-h1",
        layers=4,
        microbatches=4,
        rank=4,
    )
    found["recompute full, 1f1b, sp"] = _layout(
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        recompute="full",
        layers=4,
        microbatches=4,
        rank=4,
    )
    return found


def _offload() -> dict[str, Layout]:
    """The optimizer on the host, exactly and with ZenFlow."""
    found = {}
    exact = OffloadConfig(optimizer_offload="exact")
    zenflow = OffloadConfig(optimizer_offload="zenflow")
    inline = ZenFlowConfig(
        zenflow_topk_ratio=0.25,
        zenflow_select_strategy="step",
        zenflow_select_interval="4",
        zenflow_update_interval="2",
    )
    overlap = replace(inline, zenflow_overlap_step=True)
    for strategy in _STRATEGIES:
        for clip in (1.0, 0.0):
            words = strategy + ("" if clip else ", no clipping")
            make = partial(_layout, data_parallel_sharding_strategy=strategy, clip=clip)
            found[f"exact offload, {words}"] = make(offload=exact)
            found[f"zenflow inline, {words}"] = make(offload=zenflow, zenflow=inline, steps=6)
            found[f"zenflow overlapped, {words}"] = make(offload=zenflow, zenflow=overlap, steps=6)
    ends: tuple[Literal["updated", "reduced"], ...] = ("updated", "reduced")
    for end in ends:
        for clip in (1.0, 0.0):
            words = f"ends when {end}" + ("" if clip else ", no clipping")
            found[f"exact offload, {words}"] = _layout(offload=exact, clip=clip, end=end)
            found[f"zenflow overlapped, {words}"] = _layout(
                offload=zenflow, zenflow=overlap, clip=clip, end=end
            )
    # Not "reduced": the updates that run then are left to the end of the process.
    found["optim_grads_params, ends when updated"] = _layout(
        data_parallel_sharding_strategy="optim_grads_params", clip=0.0, end="updated"
    )
    found["exact offload, blocking"] = _layout(offload=exact, blocking=True)
    speculative = replace(exact, offload_speculative=True)
    found["exact offload, speculative"] = _layout(offload=speculative, clip=1000.0)
    found["exact offload, speculative in vain"] = _layout(offload=speculative, clip=1e-3)
    found["exact offload, fp32"] = _layout(offload=exact, dtype="fp32")
    found["exact offload, half"] = _layout(
        offload=replace(exact, optimizer_offload_fraction=0.5), clip=0.0
    )
    found["exact offload, 1f1b"] = _layout(
        offload=exact, pipeline_model_parallel_size=4, layers=4, microbatches=4, rank=2
    )
    found["zenflow with its own interval"] = _layout(
        offload=zenflow,
        zenflow=replace(overlap, zenflow_update_interval="auto", zenflow_update_interval_cap=2),
        steps=6,
    )
    return found


def _muon() -> dict[str, Layout]:
    """Matrices that go to their owners and back, along dp and along tp."""
    found = {}
    for strategy in _STRATEGIES:
        for clip in (1.0, 0.0):
            words = strategy + ("" if clip else ", no clipping")
            found[f"muon, {words}"] = _layout(
                optimizer="muon", data_parallel_sharding_strategy=strategy, clip=clip, layers=4
            )
    sharded = "optim_grads_params"
    make = partial(_layout, optimizer="muon", data_parallel_sharding_strategy=sharded, layers=4)
    found["muon, sp"] = make(tensor_model_parallel_size=2, sequence_parallel=True)
    found["muon, tp with shared heads"] = make(tensor_model_parallel_size=4)
    found["muon, fp32"] = make(dtype="fp32")
    found["muon, 1f1b"] = make(pipeline_model_parallel_size=4, microbatches=4, rank=2)
    found["muon, between steps"] = make(
        between=("replicas", "evaluate", "texts", "rollback", "save", "timeline")
    )
    return found


def _averaged() -> dict[str, Layout]:
    """Evaluations gather other weights than steps do, and steps gather theirs again."""
    make = partial(_layout, optimizer="schedule_free_adamw", layers=4)
    found = {
        f"averaged weights, {strategy}": make(
            data_parallel_sharding_strategy=strategy,
            between=("replicas", "evaluate", "texts", "rollback", "save"),
        )
        for strategy in _STRATEGIES
    }
    found["averaged weights, fp32, 1f1b, tied"] = make(
        dtype="fp32",
        tied=True,
        pipeline_model_parallel_size=4,
        microbatches=4,
        rank=3,
        between=("evaluate",),
    )
    return found


def _between_steps() -> dict[str, Layout]:
    """Evaluation, comparison of replicas, asynchronous saves and timelines, where states differ."""
    everything = ("replicas", "evaluate", "texts", "rollback", "save", "timeline")
    found = {
        f"{strategy}, between steps": _layout(
            data_parallel_sharding_strategy=strategy, between=everything
        )
        for strategy in _STRATEGIES
    }
    found["steps that grow"] = _layout(grows=True, steps=5)
    found["a line for each step, and stragglers"] = _layout(
        log=LogConfig(log_interval=1, log_straggler=True)
    )
    found["optim_grads_params, texts and rollback, 1f1b"] = _layout(
        data_parallel_sharding_strategy="optim_grads_params",
        pipeline_model_parallel_size=4,
        layers=4,
        microbatches=4,
        rank=2,
        clip=0.0,
        between=("texts", "rollback"),
        steps=4,
    )
    for name, offload in (("exact", "exact"), ("zenflow", "zenflow")):
        found[f"{name} offload, between steps"] = _layout(
            offload=OffloadConfig(optimizer_offload=cast(Any, offload)),
            between=everything,
            clip=0.0,
            steps=5,
        )
    return found


def layouts() -> Mapping[str, Callable[[Site | None], list[Event]]]:
    """Return every layout by its name, as a function that records it: its argument is the site
    whose waits and records are left out."""
    ours = model_layouts()
    return {**{name: partial(record, layout) for name, layout in ours.items()}, **user_layouts()}


def model_layouts() -> Mapping[str, Layout]:
    """Return the layouts of runs of our own model by their names."""
    return {
        **_data_parallel(),
        **_between_steps(),
        **_offload(),
        **_muon(),
        **_averaged(),
        **_pipelines(),
        **_models(),
    }
