"""Twenty training steps of one small LLaMA under any layout, and the references they must equal.

Shared by the parity tests and by ``tools/parity.py``, which prints the same numbers as a table.
"""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import torch
from megatron_llama.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.copies import Copies
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Block, Stage, build_stages
from megatron_llama.model.plan.run_params import param_groups, rank_units
from megatron_llama.pipeline.build import build_optimizer, compute_dtype, runtime_class
from megatron_llama.pipeline.runtime import PipelineRuntime
from torch import Tensor

from tests import torch_twin
from tests.harness import Cluster
from tests.torch_twin import adamw, hf_model, next_token_loss

MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
    initializer_range=0.05,
)
"""300 tokens are padded to 384, or to 512 over two tensor-parallel ranks: both hold real rows and the second holds padding."""
WHOLE_TILES = replace(MODEL, hidden_size=128, intermediate_size=512, head_dim=128)
"""The same model of sizes with which tiles of 128 cross no cut of up to four tensor-parallel ranks."""
OPTIMIZER, NO_OFFLOAD = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0), OffloadConfig()
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
SEQ_LENGTH, GLOBAL_BATCH_SIZE, STEPS = 32, 8, 20
LOSS_BOUND, NORM_BOUND = 1e-6, 2e-5
"""Relative. Where fp32 itself is further than half of this from fp64, twice that distance is the bound."""


@dataclass(frozen=True)
class Layout:
    """How one run is spread and what it trains."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    virtual: int = 1
    sp: bool = False
    ep: int = 1
    exchange: bool = False
    """Tokens travel only to ranks that have some of their experts."""
    tp_comm: str = "0"
    """Pieces of the messages of tensor-parallel layers."""
    cp_comm: Literal["all_gather", "ring", "a2a", "a2a+p2p"] = "all_gather"
    """With a2a+p2p pairs of neighbours exchange heads."""
    strategy: Strategy = "optim"
    slots: str = "default"
    """Parameter slots, with optim_grads_params."""
    grad_slots: int = 2
    shard_size: int = 0
    """Ranks that share a bucket; 0: all."""
    prefetch: int = 0
    """Bytes; 0: no limit."""
    freeze: tuple[str, ...] = ()
    lora: int = 0
    """Rank of low-rank additions to the projections in ``targets``."""
    targets: tuple[str, ...] = LoraConfig().lora_target_modules
    early: bool = False
    """Announce the update, so that without clipping buckets are updated as they are reduced."""
    microbatches: int = 1
    """Of each data-parallel rank, in one step."""
    schedule: Schedule = "1f1b"
    split: tuple[int, ...] = ()
    """Blocks of each stage; default: equal shares."""
    layers: int = MODEL.num_hidden_layers
    kv_heads: int = MODEL.num_key_value_heads
    recompute: Literal["none", "selective", "full"] = "none"
    tied: bool = False
    pad: int | None = None
    """The padding token, whose row lookups do not train."""
    trains_pad: bool = False
    documents: bool = False
    """Documents end at full stops: attention, positions and loss respect it."""
    bucket: int = 20_000
    fp64: bool = False
    bf16: bool = False
    fp16: bool = False
    loss_scale: float = 65536.0
    """At the start, with fp16."""
    fp8: bool = False
    """The inner layers multiply in FP8, and all else is bf16; with fp64 it is the same model in fp64. Matrices have whole tiles on every
    rank."""
    reduce_bf16: bool = False
    """Gradients cross the wire in bfloat16."""
    sums_wide: bool = False
    """And a device adds them up in fp32, as the host always does."""
    clip: float = 1.0
    steps: int = STEPS
    first: int = 0
    """Number of the first global batch."""
    offload: OffloadConfig = NO_OFFLOAD
    blocking: bool = False
    """Wait for offload at once."""
    graphs: bool = False
    """Planned for blocks that run as graphs: who trains makes the graphs."""

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def reference(self) -> Layout:
        """The same training in one process, in one batch, in fp32 or fp64."""
        kept = ("tied", "pad", "trains_pad", "documents", "fp64", "clip", "steps", "layers", "kv_heads", "freeze", "lora", "targets", "fp8")
        return Layout(**{name: getattr(self, name) for name in kept})

    @property
    def name(self) -> str:
        """What differs from one process."""
        words = [f"{axis}{size}" for axis in ("tp", "cp", "pp", "dp", "ep") if (size := getattr(self, axis)) > 1] or ["one process"]
        words += ["alltoall"] * self.exchange + ["sp"] * self.sp + ([f"tp in {self.tp_comm} pieces"] if self.tp_comm != "0" else []) + ([self.cp_comm] if self.cp > 1 else []) + ([self.strategy] if self.dp * self.cp > 1 else [])
        words += [f"{self.slots} slots"] if self.slots != "default" else []
        words += [f"{self.grad_slots} gradient slots"] if self.grad_slots != 2 else []
        words += [f"shards of {self.shard_size}"] if self.shard_size else []
        words += [f"prefetch {self.prefetch}"] if self.prefetch else []
        words += ["frozen"] * bool(self.freeze) + ["early"] * self.early + ([f"lora {self.lora}"] if self.lora else [])
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [self.schedule] if self.pp > 1 else []
        words += [f"virtual {self.virtual}"] if self.virtual > 1 else []
        words += ["split " + "-".join(map(str, self.split))] if self.split else []
        words += [f"{self.layers} layers"] if self.layers != MODEL.num_hidden_layers else []
        words += [f"{self.kv_heads} kv heads"] if self.kv_heads != MODEL.num_key_value_heads else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"pad {self.pad}"] * (self.pad is not None) + ["trained"] * self.trains_pad
        words += ["tied"] * self.tied + ["documents"] * self.documents + ["bf16 reduction"] * self.reduce_bf16 + ["wide sums"] * self.sums_wide
        words += [self.offload.optimizer_offload] * (self.offload != NO_OFFLOAD) + ["speculative"] * self.offload.offload_speculative
        return " ".join(words + ["fp64"] * self.fp64 + ["bf16"] * self.bf16 + ["fp16"] * self.fp16 + ["fp8"] * self.fp8)

    def config(self) -> Config:
        """The trainer's configuration."""
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            cp_comm_type=self.cp_comm,
            hierarchical_context_parallel_sizes=(2, self.cp // 2) if self.cp_comm == "a2a+p2p" else (),
            sequence_parallel=self.sp,
            expert_model_parallel_size=self.ep,
            moe_token_dispatcher_type="alltoall" if self.exchange else "allgather",
            tp_comm_overlap=self.tp_comm,
            pipeline_schedule=self.schedule,
            virtual_pipeline_model_parallel_size=self.virtual,
            pipeline_layer_split=self.split,
            recompute_granularity=self.recompute,
            data_parallel_sharding_strategy=self.strategy,
            reduce_bucket_size=self.bucket,
            grad_reduce_in_bf16=self.reduce_bf16,
            ddp_reduce_scatter_with_fp32_accumulation=self.sums_wide,
            param_slots=self.slots,
            grad_slots=self.grad_slots,
            data_parallel_shard_size=self.shard_size,
            prefetch_bytes=self.prefetch,
        )
        return Config(
            model=replace(
                WHOLE_TILES if self.fp8 else MODEL,
                tie_word_embeddings=self.tied,
                num_hidden_layers=self.layers,
                num_key_value_heads=self.kv_heads,
                pad_token_id=self.pad,
            ),
            parallel=parallel,
            training=TrainingConfig(
                fp64=self.fp64,
                bf16=self.bf16 or (self.fp8 and not self.fp64),
                fp16=self.fp16,
                initial_loss_scale=self.loss_scale,
                fp8="blockwise" if self.fp8 and not self.fp64 else "none",
                fp8_bf16_layers=min(1, (self.layers - 1) // 2),
                cuda_graph_scope="block" if self.graphs else "none",
            ),
            optimizer=replace(OPTIMIZER, clip_grad=self.clip, freeze=self.freeze, train_pad_embedding=self.trains_pad),
            offload=self.offload,
            lora=LoraConfig(lora_rank=self.lora, lora_target_modules=self.targets),
        )

    def weights(self) -> Callable[[Rectangle, Tensor], None]:
        """With which the training starts."""
        return AdaptedWeights() if self.lora else initial_weights()

    def sized(self) -> Config:
        """The configuration with the numbers of a step, as plans need them."""
        config = self.config()
        micro = GLOBAL_BATCH_SIZE // (self.dp * self.microbatches)
        sizes = replace(config.training, seq_length=SEQ_LENGTH, micro_batch_size=micro, global_batch_size=micro * self.dp * self.microbatches)
        return replace(config, training=sizes, data=replace(config.data, eod_mask_loss=self.documents))


@dataclass(frozen=True)
class Piece:
    """A rectangle of a HuggingFace tensor as one rank holds it after training."""

    rectangle: Rectangle
    master: Tensor
    primary: bool


@dataclass(frozen=True)
class Record:
    """One rank's account of a run."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Before clipping."""
    pieces: tuple[Piece, ...] = ()
    parameters: str = ""
    """Digest of all compute parameters of this rank."""
    dp_line: tuple[int, ...] = ()
    """Context-parallel ones included: the ranks whose compute parameters must be the same, those of experts too."""


@dataclass(frozen=True)
class Trainer:
    """The composition that a training run has, without its files."""

    layout: Layout
    mesh: Mesh
    stages: dict[int, Stage]
    optimizer: OverlappedDistributedOptimizer
    runtime: PipelineRuntime

    def step(self, index: int) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of one step."""
        rates = [group.lr for group in param_groups(self.layout.config()).configs]
        if self.layout.early:
            self.optimizer.announce_step(rates, clip=self.layout.clip)
        loss = self.runtime.step(self.batches(index))
        return loss, self.optimizer.step(rates, clip=self.layout.clip).grad_norm

    def batches(self, index: int) -> list[Batch]:
        """This data-parallel rank's microbatches: the global batch is the same whatever the layout."""
        size = GLOBAL_BATCH_SIZE // (self.layout.dp * self.layout.microbatches)
        starts = (index * GLOBAL_BATCH_SIZE + (m * self.layout.dp + self.mesh.data_rank) * size for m in range(self.layout.microbatches))
        return [batch(range(start, start + size), documents=self.layout.documents) for start in starts]


def trainer(
    place: Place,
    layout: Layout,
    device: torch.device | None = None,
    copies: Copies | None = None,
    block: type[Block] = Block,
    inline: bool = False,
) -> Trainer:
    """Build everything, with the initial weights that all layouts share. On the CPU, unless ``device`` is given. ``copies``: of offload.
    ``inline``: everything is issued by the thread that computes, as on a device."""
    config = layout.config()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=device or torch.device("cpu"))
    stages = build_stages(config, mesh, block)
    optimizer = build_optimizer(config, stages.values(), mesh, copies=copies, blocking=layout.blocking, inline=inline)
    optimizer.load_weights(layout.weights())
    runtime = runtime_class(config)(stages, optimizer, mesh, config, dtype=compute_dtype(config))
    return Trainer(layout, mesh, stages, optimizer, runtime)


def train(place: Place, layout: Layout, block: type[Block] = Block) -> Record:
    """Run all steps."""
    run = trainer(place, layout, block=block)
    return record(run, [run.step(index) for index in range(layout.first, layout.first + layout.steps)])


def record(run: Trainer, steps: Sequence[tuple[Tensor, Tensor]]) -> Record:
    """What is left of a run that took these steps. Collective."""
    run.optimizer.settle()
    pieces = (Piece(piece.rectangle, piece.tensors["master"].clone(), piece.primary) for piece in shard_pieces(run.optimizer))
    return Record(
        losses=tuple(loss.item() for loss, _ in steps),
        norms=tuple(norm.item() for _, norm in steps),
        pieces=tuple(pieces),
        parameters=digest(parameter for _, parameter in whole_parameters(run)),
        dp_line=(run.mesh.dp if run.mesh.experts is None else run.mesh.experts.dp).ranks,
    )


def whole_parameters(run: Trainer) -> Iterator[tuple[str, Tensor]]:
    """All compute parameters of this rank by name, unit by unit, as a forward pass sees them: read each before the next. Collective."""
    parameters = {name: parameter for stage in run.stages.values() for name, parameter in stage.named_parameters()}
    config, mesh = run.layout.config(), run.mesh
    units = [unit for stage in rank_units(config, rank=mesh.pp.rank, tp_rank=mesh.tp.rank) for unit in stage]
    run.optimizer.begin_evaluation([WeightAccess(number, backward=False) for number in range(len(units))])
    for number, unit in enumerate(units):
        run.optimizer.access(number, False)
        for spec in unit.params:
            handle = param_handle_of(parameters[spec.name])
            assert handle is not None
            handle.wait_unsharded()
            yield spec.name, parameters[spec.name].detach()


def digest(tensors: Iterable[Tensor]) -> str:
    """Of all bits."""
    total = hashlib.blake2b()
    for tensor in tensors:
        total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def initial_weights() -> InitialWeights:
    """Seed and scale of every run here."""
    return InitialWeights(1234, MODEL.initializer_range)


class AdaptedWeights:
    """The same, with low-rank additions that are not zero: both halves are drawn as matrices are."""

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See WeightSource."""
        initial_weights()(replace(rectangle, name=rectangle.name.replace("lora_", "drawn_")), out)


@cache
def _text() -> bytes:
    return "".join(pydoc_data.topics.topics.values()).encode()


def token_ids(count: int) -> Tensor:
    """English text as ids below 300. Bytes times 7 modulo 300 are distinct, and text uses ids on both sides of 256."""
    return torch.frombuffer(bytearray(_text()[:count]), dtype=torch.uint8).to(torch.int64) * 7 % MODEL.vocab_size


def samples(positions: range) -> Tensor:
    """[b, SEQ_LENGTH + 1] consecutive windows of the text."""
    ids = token_ids(positions.stop * SEQ_LENGTH + 1)
    return torch.stack([ids[p * SEQ_LENGTH : (p + 1) * SEQ_LENGTH + 1] for p in positions])


def global_samples(index: int) -> Tensor:
    """All samples of a step."""
    return samples(range(index * GLOBAL_BATCH_SIZE, (index + 1) * GLOBAL_BATCH_SIZE))


def batch(positions: range, *, documents: bool = False) -> Batch:
    """One microbatch, sequence first."""
    text = samples(positions)
    tokens, labels = text[:, :-1].t().contiguous(), text[:, 1:].t().contiguous()
    if not documents:
        return Batch(tokens, labels)
    ends = tokens == ord(".") * 7 % MODEL.vocab_size
    ids = ends.cumsum(0) - ends.to(torch.int64)
    place = torch.arange(SEQ_LENGTH).unsqueeze(-1).expand_as(tokens)
    starts = torch.where(torch.cat((torch.zeros_like(ends[:1]), ends[:-1])), place, 0).cummax(0).values
    return Batch(tokens, labels, (~ends).float(), place - starts, ids.to(torch.int32))


def train_hf(layout: Layout) -> Record:
    """The same steps with transformers and torch's optimizer."""
    return train_twin(hf_model(layout.config().model, torch.float64 if layout.fp64 else torch.float32), layout)


def train_twin(model: torch.nn.Module, layout: Layout) -> Record:
    """The steps of a layout with a model of transformers, of which everything is trained that wants gradients."""
    optimizer = adamw(model.parameters(), OPTIMIZER)
    losses, norms = torch_twin.train(model, optimizer, lambda index: [next_token_loss(model, global_samples(layout.first + index))], layout.steps, layout.clip)
    return Record(tuple(losses), tuple(norms))


def merged(records: Sequence[Record]) -> dict[str, Tensor]:
    """The trained HuggingFace tensors. Asserts that every element is owned exactly once and that all copies are bitwise equal."""
    pieces = [piece for record in records for piece in record.pieces]
    shapes = {piece.rectangle.name: piece.rectangle.shape for piece in pieces}
    weights = {name: torch.zeros(shape, dtype=pieces[0].master.dtype) for name, shape in shapes.items()}
    owners = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for piece in pieces:
        if piece.primary:
            weights[piece.rectangle.name][_place(piece)] = piece.master
            owners[piece.rectangle.name][_place(piece)] += 1
    for name, count in owners.items():
        assert bool((count == 1).all()), f"{name}: {int((count != 1).sum())} elements not owned exactly once"
    for piece in pieces:
        assert torch.equal(weights[piece.rectangle.name][_place(piece)], piece.master), f"{piece.rectangle}: copies differ"
    return weights


def _place(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.rectangle.offset, piece.rectangle.size, strict=True))


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference over the steps; NaN if any is."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def bounds(loss_rounding: float, norm_rounding: float) -> tuple[float, float]:
    """Of losses and norms, by the deviations of a run in fp32 from the same one in fp64: they depend on the processor's kernels."""
    return max(LOSS_BOUND, 2 * loss_rounding), max(NORM_BOUND, 2 * norm_rounding)


@dataclass(frozen=True)
class Row:
    """One line of the parity table: the largest relative deviations over all steps, and their bounds."""

    name: str
    loss: float
    """From one process."""
    norm: float
    loss_hf: float | None
    """From HuggingFace; None where transformers has no counterpart."""
    norm_hf: float | None
    loss_rounding: float
    """Of one process in fp32 from one process in fp64."""
    norm_rounding: float
    is_reference: bool

    @property
    def loss_bound(self) -> float:
        """What both loss deviations must not exceed."""
        return max(LOSS_BOUND, 2 * self.loss_rounding)

    @property
    def norm_bound(self) -> float:
        """What both norm deviations must not exceed."""
        return max(NORM_BOUND, 2 * self.norm_rounding)

    @property
    def holds(self) -> bool:
        """Whether every deviation is within its bound. False for NaN."""
        losses, norms = (self.loss, self.loss_hf or 0.0), (self.norm, self.norm_hf or 0.0)
        return all(loss <= self.loss_bound for loss in losses) and all(norm <= self.norm_bound for norm in norms)


@dataclass(frozen=True)
class Reference:
    """What a layout is compared with."""

    single: Record
    """One process, one microbatch."""
    exact: Record
    """The same in fp64."""
    hf: Record | None
    """transformers; None where it has no counterpart."""
    first: int = 0
    """Number of the first global batch."""

    def row(self, name: str, record: Record) -> Row:
        """The comparison of one run."""
        return Row(
            name,
            deviation(record.losses, self.single.losses),
            deviation(record.norms, self.single.norms),
            None if self.hf is None else deviation(record.losses, self.hf.losses),
            None if self.hf is None else deviation(record.norms, self.hf.norms),
            deviation(self.single.losses, self.exact.losses),
            deviation(self.single.norms, self.exact.norms),
            record is self.single,
        )


def reference(cluster: Cluster, layout: Layout) -> Reference:
    """Train what a layout is compared with."""
    alone = layout.reference
    single, exact = (cluster.run(1, train, run)[0] for run in (alone, replace(alone, fp64=True)))
    return Reference(single, exact, None if layout.documents else train_hf(alone))


FULL = Layout(tp=2, pp=2, dp=2, sp=True)
LAYOUTS = (
    Layout(microbatches=4),
    Layout(tied=True, microbatches=4),
    Layout(tp=2, sp=True),
    Layout(tp=2, tied=True),
    Layout(tp=4, sp=True, dp=2, strategy="optim_grads"),
    Layout(tp=4, kv_heads=1, sp=True),
    Layout(tp=2, kv_heads=1, sp=True, pp=2, microbatches=2, schedule="zb-h1", recompute="selective"),
    Layout(tp=2, kv_heads=1, sp=True, cp=2, recompute="full"),
    Layout(tp=4, kv_heads=1, sp=True, tp_comm="3", recompute="full"),
    Layout(tp=2, tp_comm="2", recompute="selective", microbatches=2, tied=True),
    Layout(tp=2, sp=True, pp=2, tp_comm="4", microbatches=4, schedule="zb-h1", strategy="optim_grads"),
    *(Layout(dp=2, strategy=strategy, microbatches=4) for strategy in STRATEGIES),
    Layout(dp=2, microbatches=4, documents=True),
    Layout(cp=4, cp_comm="ring"),
    Layout(cp=2, tp=2, sp=True, cp_comm="a2a", microbatches=2),
    Layout(cp=4, cp_comm="a2a", recompute="full"),
    Layout(cp=2, pp=2, cp_comm="a2a", documents=True, schedule="zb-h1", microbatches=4),
    Layout(cp=4, cp_comm="a2a+p2p", documents=True),
    Layout(cp=4, pp=2, kv_heads=1, cp_comm="a2a+p2p", microbatches=2),
    Layout(cp=2, dp=2, strategy="optim_grads", microbatches=2),
    Layout(cp=2, documents=True),
    Layout(cp=2, cp_comm="ring", documents=True),
    Layout(tp=2, cp=2, pp=2, sp=True, microbatches=4),
    replace(FULL, strategy="no_shard"),
    replace(FULL, strategy="optim", microbatches=4, schedule="gpipe"),
    replace(FULL, strategy="optim_grads_params", microbatches=4),
    replace(FULL, strategy="optim_grads", microbatches=2, tied=True),
    replace(FULL, microbatches=2, documents=True),
    replace(FULL, strategy="optim_grads", microbatches=4, schedule="zb-h1", tied=True),
    Layout(pp=4, microbatches=8),
    Layout(pp=4, microbatches=8, schedule="zb-h1"),
    Layout(pp=2, microbatches=4, tied=True),
    Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved"),
    Layout(pp=2, virtual=3, layers=6, dp=2, microbatches=2, schedule="interleaved", tied=True, strategy="optim_grads"),
    Layout(pp=2, virtual=3, layers=4, split=(0, 1, 1, 1, 1, 0), microbatches=4, schedule="interleaved"),
    Layout(pp=2, layers=4, split=(4, 0), tied=True, microbatches=2),
    Layout(pp=4, dp=2, layers=2, split=(0, 1, 1, 0), microbatches=4, strategy="optim_grads_params", bucket=4000),
    Layout(tp=2, sp=True, pp=2, split=(0, 2, 2, 0), tied=True, microbatches=4, schedule="zb-v", recompute="full"),
    Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v"),
    Layout(pp=2, virtual=2, dp=2, microbatches=4, schedule="zb-v", tied=True, strategy="optim_grads"),
    Layout(pp=3, layers=5, split=(1, 3, 1), microbatches=4, tied=True),
)
"""The parity table, and what test_parity.py trains, counts and traces: every axis, schedule, way to shard and kind of model, alone and
together."""
