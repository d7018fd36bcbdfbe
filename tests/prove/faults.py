"""Seeded faults: what has gone wrong in trainers like this one, put into this one.

Each fault is a patch of the running package, of the size that the mistake itself has, applied where the ranks run and taken back
afterwards. It crashes nothing and says nothing: only a comparison finds it. ``CATALOGUE`` says of each which public issue it is modelled
on, in which small case it shows, and what a proof has to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.model_folders.hf import writer
from megatron_llama.config.batch_ramp import with_epochs
from megatron_llama.config.schema import Config
from megatron_llama.data import loader
from megatron_llama.data.loader import Batch, BatchLoader, BlendedSamples
from megatron_llama.data.megatron_order import MegatronStream
from megatron_llama.engine import optimizer as engine
from megatron_llama.engine.comm import autograd
from megatron_llama.engine.comm.collectives import DONE
from megatron_llama.engine.exchanges import BucketExchanges
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.engine.pieces import step_counts
from megatron_llama.engine.plan.specs import ParamSpec, Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model import init, llama
from megatron_llama.model.hf import carried_config
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn import context, loss, ops, recompute, rotary, sliding_context
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.documents import SplitDocuments
from megatron_llama.model.nn.embedding import VocabParallelEmbedding, _Lookup
from megatron_llama.model.nn.linear import RowLinear, _AddBias, plain_linear
from megatron_llama.model.nn.moe import block as moe_block
from megatron_llama.model.nn.moe import dispatch, exchange, routing
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, Routing
from megatron_llama.model.nn.moe.rows import ExpertRows
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan import experts, lora, params, zigzag
from megatron_llama.model.plan.lora import LORA_A
from megatron_llama.model.plan.params import Shapes
from megatron_llama.model.plan.zigzag import zigzag_chunks
from megatron_llama.model.positions import Positions
from megatron_llama.pipeline import objective, runtime
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.prove.case import Case
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.train.run import loop as training_loop
from megatron_llama.train.run import lr
from megatron_llama.train.setup import inputs
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import ExampleSamples
from megatron_llama.tune.sft.formats import Conversation
from megatron_llama.tune.sft.marks import LossOn
from megatron_llama.tune.sft.template import ChatTemplate, Rendered
from numpy.typing import NDArray
from torch import Tensor

Patch = Callable[[], AbstractContextManager[object]]


def norms_not_summed() -> AbstractContextManager[object]:
    """Each tp rank keeps the gradient of norms through its own part of the sequence."""
    correct = Shapes._norm
    return patch.object(Shapes, "_norm", lambda *args: replace(correct(*args), partial_grad=False))


def head_norms_not_summed() -> AbstractContextManager[object]:
    """Each tp rank keeps the gradient of the norms of queries and keys through its own heads."""
    return _not_summed(Shapes, "_head_norms")


def _not_summed(owner: object, name: str) -> AbstractContextManager[object]:
    """The gradients of what a function of the table of parameters describes are never terms."""
    correct = getattr(owner, name)

    def described(*args: Any, **options: Any) -> tuple[ParamSpec, ...]:
        return tuple(replace(spec, partial_grad=False) for spec in correct(*args, **options))

    return patch.object(owner, name, described)


def shared_heads_not_summed() -> AbstractContextManager[object]:
    """Each copy of a key/value head keeps the gradient through its own queries."""
    return _not_summed(Shapes, "_attention_inputs")


def clip_counts_copies() -> AbstractContextManager[object]:
    """The gradient norm counts what several tp ranks hold once for each of them."""
    correct = OverlappedDistributedOptimizer._take_squared_norm

    def take(self: OverlappedDistributedOptimizer, bucket: int) -> Tensor:
        squared_norm = correct(self, bucket)
        tied = self.bucket_plan.buckets[bucket].kind.tied
        if not self.mesh.dp_replica.rank and not (tied and self.mesh.embedding.rank):
            self._squared_norms[bucket] = squared_norm
        return squared_norm

    return patch.object(OverlappedDistributedOptimizer, "_take_squared_norm", take)


def bias_on_every_rank() -> AbstractContextManager[object]:
    """Each tp rank adds the bias of a row-parallel layer before the sum over tp."""

    def forward(self: RowLinear, x: Any) -> Tensor:
        out = plain_linear(x, self.weight, self.tp)
        if self.bias is not None:
            out = _AddBias.apply(out, self.bias)  # type: ignore[no-untyped-call]
        return autograd.scatter_sequence(out, self.tp) if self.sequence_parallel else autograd.reduce(out, self.tp)

    return patch.object(RowLinear, "forward", forward)


def logits_of_other_ranks() -> AbstractContextManager[object]:
    """The logits of a token get a gradient only on the tp rank that has its label."""
    correct = loss._vocab_parallel

    def vocab_parallel(rows: Tensor, labels: Tensor, chunks: list[slice], tp: Any, valid: int, weights: Any, *z: float) -> Tensor:
        losses = correct(rows, labels, chunks, tp, valid, weights, *z)
        if weights is not None:
            rows[labels // rows.shape[1] != tp.rank] = 0.0
        return losses

    return patch.object(loss, "_vocab_parallel", vocab_parallel)


def tokens_of_other_ranks() -> AbstractContextManager[object]:
    """Tokens whose embedding another tp rank holds add their gradient to the first row of this one."""
    correct = _Lookup.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        local, _ = ctx.saved_tensors
        return correct(_Saved(ctx, (local, None)), grad)

    return patch.object(_Lookup, "backward", staticmethod(backward))


class _Saved:
    """The context of a backward pass, with other saved tensors."""

    def __init__(self, ctx: Any, tensors: tuple[Tensor | None, ...]) -> None:
        self._ctx = ctx
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def padding_row_of_every_rank() -> AbstractContextManager[object]:
    """Each tp rank leaves out the gradient of its own row with the number that the padding token has on its rank."""
    correct = VocabParallelEmbedding.forward

    def forward(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        if self.padding_idx is None:
            return correct(self, ids)
        rows = self.weight.shape[0]
        with patch.object(self, "padding_idx", self.padding_idx % rows + rows * self.tp.rank):
            return correct(self, ids)

    return patch.object(VocabParallelEmbedding, "forward", forward)


def padding_token_trained() -> AbstractContextManager[object]:
    """Lookups of the padding token train its row of the embedding."""
    return patch.object(llama, "padding_idx", lambda config: None)


def padding_of_the_vocabulary() -> AbstractContextManager[object]:
    """Rows that pad the vocabulary, to a multiple that depends on tp, take part in the softmax."""
    correct = loss.cross_entropy

    def cross_entropy(logits: Tensor, labels: Tensor, tp: Any, vocab_size: int, **options: Any) -> Tensor:
        return correct(logits, labels, tp, logits.shape[-1] * tp.size, **options)

    return patch.object(runtime, "cross_entropy", cross_entropy)


def low_rank_halves_not_summed() -> AbstractContextManager[object]:
    """The half of a low-rank addition that all tp ranks hold keeps this rank's gradient."""
    return _not_summed(lora, "_adapter")


def low_rank_spread_of_a_shard() -> AbstractContextManager[object]:
    """The first half of a low-rank addition is drawn with the spread that suits the inputs of one tp rank."""
    correct = init.WithAdapters.__call__

    def write(self: init.WithAdapters, rectangle: Rectangle, out: Tensor) -> None:
        correct(self, rectangle, out)
        if f".{LORA_A}." in rectangle.name:
            out.mul_((rectangle.shape[1] / rectangle.size[1]) ** 0.5)

    return patch.object(init.WithAdapters, "__call__", write)


def positions_in_rank_order() -> AbstractContextManager[object]:
    """Rotary positions are those of one consecutive part of the sequence for each cp rank, but the parts are zig-zag."""
    correct = Stage.positions

    def positions(self: Stage, length: int, device: torch.device, position_ids: Tensor | None = None, *others: Any) -> Positions:
        cp = self.mesh.cp
        if cp.size > 1:
            own = local_sequence(torch.arange(length), cp)
            position_ids = torch.zeros(length, 1, dtype=torch.int64)
            position_ids[own, 0] = torch.arange(len(own)) + cp.rank * len(own)
        return correct(self, length, device, position_ids, *others)

    return patch.object(Stage, "positions", positions)


def documents_forgotten() -> AbstractContextManager[object]:
    """Under context parallelism attention crosses documents."""
    return patch.object(SplitDocuments, "of", lambda *args: None)


def own_block_in_the_second_hop() -> AbstractContextManager[object]:
    """From the second hop of a ring on, each rank passes on its own keys and values again, and not what it has received."""
    correct = context._ring_block
    first_hop: list[Tensor] = []

    def ring_block(key_value: Tensor, cp: Axis, step: int) -> Any:
        # The neighbour's own block is what has come with the first hop.
        if step == 1:
            first_hop[:] = [key_value]
        return correct(first_hop[0] if step > 1 else key_value, cp, step)

    return patch.object(context, "_ring_block", ring_block)


def window_in_the_chunk_before() -> AbstractContextManager[object]:
    """Under context parallelism a window reaches into the chunk before a token's own, and never into the one before that."""
    correct = zigzag.reached

    def reached(keys: int, queries: int, length: int, window: int) -> int:
        return correct(keys, queries, length, window) if queries - keys == 1 else 0

    return _together(patch.object(zigzag, "reached", reached), patch.object(sliding_context, "reached", reached))


def labels_shifted_after_the_split() -> AbstractContextManager[object]:
    """Each cp rank shifts the tokens of its own two chunks: one label of each rank is another token, and one is lost."""
    correct = PipelineRuntime.step

    def step(self: PipelineRuntime, batches: Sequence[Batch]) -> Tensor:
        return correct(self, [_shifted_by_rank(batch, self.mesh.cp.size) for batch in batches])

    return patch.object(PipelineRuntime, "step", step)


def _shifted_by_rank(batch: Batch, size: int) -> Batch:
    if size == 1:
        return batch
    chunk = len(batch.tokens) // (2 * size)
    labels = batch.labels.clone()
    mask = torch.ones(labels.shape) if batch.loss_mask is None else batch.loss_mask.clone()
    for rank in range(size):
        own = torch.cat([torch.arange(part * chunk, (part + 1) * chunk) for part in zigzag_chunks(rank, size)])
        labels[own[:-1]] = batch.tokens[own[1:]]
        mask[own[-1]] = 0.0
    return replace(batch, labels=labels, loss_mask=mask)


def tied_ends_not_summed() -> AbstractContextManager[object]:
    """Embedding and head, which are one tensor, each keep the gradient of their own end of the pipeline."""
    return patch.object(engine, "all_reduce", lambda tensor, axis: DONE)


def virtual_stages_rank_by_rank() -> AbstractContextManager[object]:
    """Virtual stages get their layers as if those of a rank followed each other (two ranks)."""
    correct = params.split_layers

    def split_layers(layers: int, stages: int, **options: Any) -> tuple[range, ...]:
        right = correct(layers, stages, **options)
        return right if stages < 4 else tuple(right[(stage % 2) * (stages // 2) + stage // 2] for stage in range(stages))

    return patch.object(params, "split_layers", split_layers)


def recomputed_from_the_layer_before() -> AbstractContextManager[object]:
    """Backward computes each layer again from the input of the layer before it."""
    correct = recompute.recomputed
    inputs: list[Tensor] = []

    def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Tensor:
        before = inputs.pop() if inputs and inputs[-1].shape == x.shape else x.detach()
        inputs[:] = [x.detach()]
        first = [True]

        def from_before(x: Tensor) -> Tensor:
            value = x if first else before + (x - x.detach())
            first.clear()
            return function(value)

        return correct(from_before, x, **options)

    return patch.object(llama, "recomputed", recomputed)


def divided_by_ranks_again() -> AbstractContextManager[object]:
    """The sum over data-parallel ranks is divided by their number, which the loss has been already."""
    correct = GradientBuckets._finalize

    def complete(self: GradientBuckets, bucket: int) -> None:
        self.shards[bucket].div_(self.bucket_plan.shards)
        correct(self, bucket)

    return patch.object(GradientBuckets, "_finalize", complete)


def weights_of_the_step_before() -> AbstractContextManager[object]:
    """What is gathered last comes before the others have updated it: their part of the weights is a step old."""
    correct = ParameterBuckets._wait

    def wait(self: ParameterBuckets, slot: Any) -> None:
        slots = self.bucket_plan.parameter_slots
        [bucket] = [b for b in range(len(slots)) if slots[b] == slot and self.holds(b)]
        correct(self, slot)
        if bucket != self.bucket_plan.forward_order[-1]:
            return
        whole = self.unsharded[bucket]
        own = self.bucket_plan.shard(bucket, dist.get_rank() if dist.is_initialized() else 0)
        received = whole.clone()
        before = self.__dict__.get("before", received)
        whole.copy_(before)
        whole[own] = received[own]
        self.__dict__["before"] = received

    return patch.object(ParameterBuckets, "_wait", wait)


def sent_in_bf16() -> AbstractContextManager[object]:
    """Gradients cross the wire in bfloat16, which nobody has asked for."""

    def gradient_buckets(bucket_plan: Any, mesh: Mesh, **options: Any) -> GradientBuckets:
        return GradientBuckets(bucket_plan, mesh, **options | {"wire": torch.bfloat16})

    return patch.object(engine, "GradientBuckets", gradient_buckets)


def norm_of_the_own_shard() -> AbstractContextManager[object]:
    """Each data-parallel rank clips by the norm of its own shard."""

    def grad_norm(self: OverlappedDistributedOptimizer, skip_update: Tensor | None) -> tuple[Tensor, Tensor]:
        self._sum_copies()
        return self._squared_norms.sum().sqrt().to(torch.float32), torch.zeros((), dtype=torch.float64)

    return patch.object(OverlappedDistributedOptimizer, "_grad_norm", grad_norm)


def replicas_not_summed() -> AbstractContextManager[object]:
    """With hybrid sharding no gradient leaves the ranks that share a bucket."""
    return patch.object(BucketExchanges, "sum_over_replicas", lambda self, bucket: None)


def shards_not_zeroed() -> AbstractContextManager[object]:
    """Reduced gradients are added to those of the step before."""
    take, follow_up = BucketExchanges.take, GradientBuckets._follow_up

    def take_later(self: BucketExchanges, bucket: int, *, first: bool) -> Any:
        return take(self, bucket, first=False)

    def add(self: GradientBuckets, *args: Any, first: bool, final: bool) -> None:
        follow_up(self, *args, first=False, final=final)

    return _together(patch.object(BucketExchanges, "take", take_later), patch.object(GradientBuckets, "_follow_up", add))


@contextmanager
def _together(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


def data_repeated() -> AbstractContextManager[object]:
    """All data-parallel ranks read the samples of the first one."""
    correct = BatchLoader.__init__

    def make(self: BatchLoader, *args: Any, **options: Any) -> None:
        correct(self, *args, **options | {"dp_rank": 0})

    return patch.object(BatchLoader, "__init__", make)


def schedule_in_processes() -> AbstractContextManager[object]:
    """The schedule of the learning rate goes on by one step for each process."""
    correct = lr.learning_rate

    def learning_rate(config: Any, train_iters: int, iteration: int, consumed_samples: int) -> float:
        processes = dist.get_world_size() if dist.is_initialized() else 1
        return correct(config, train_iters, iteration * processes, consumed_samples)

    return patch.object(training_loop, "learning_rate", learning_rate)


def mean_of_microbatches() -> AbstractContextManager[object]:
    """The loss is the mean of the means of the microbatches, which have not all as many target tokens."""
    correct = objective.NextToken.begin

    def begin(self: objective.NextToken, batches: Sequence[Any], mesh: Any, known: Tensor | None) -> Any:
        whole = correct(self, batches, mesh, known)

        def microbatch(batch: Any) -> Any:
            tokens = _target_tokens([batch]) * len(batches) * mesh.data_size
            return objective._NextTokenLoss(tokens, mesh).microbatch(batch)

        return SimpleNamespace(weight=whole.weight, microbatch=microbatch)

    return patch.object(objective.NextToken, "begin", begin)


def mean_of_ranks() -> AbstractContextManager[object]:
    """The loss is the mean of the means of the data-parallel ranks, which have not all as many target tokens."""

    def target_tokens(batches: Sequence[Any], mesh: Any) -> Tensor:
        return _target_tokens(batches) * int(mesh.data_size)

    return patch.object(objective, "target_tokens", target_tokens)


def _target_tokens(batches: Sequence[Any]) -> Tensor:
    counts = [batch.labels.numel() if batch.loss_mask is None else float(batch.loss_mask.sum()) for batch in batches]
    return torch.tensor(max(1.0, sum(counts)), dtype=torch.float64)


def gradient_of_the_last_microbatch() -> AbstractContextManager[object]:
    """Each microbatch overwrites the weight gradients of those before it."""
    correct = GradientBuckets.grad_view

    def grad_view(self: GradientBuckets, *args: Any) -> tuple[Tensor, float]:
        return correct(self, *args)[0], 0.0

    return patch.object(GradientBuckets, "grad_view", grad_view)


def last_microbatch_dropped() -> AbstractContextManager[object]:
    """The last microbatch of a step is never computed."""
    correct = BatchLoader.microbatches

    def microbatches(self: BatchLoader, consumed_samples: int) -> list[Batch]:
        batches = correct(self, consumed_samples)
        return batches[:-1] or batches

    return patch.object(BatchLoader, "microbatches", microbatches)


def rope_factor_of_8() -> AbstractContextManager[object]:
    """LLaMA 3's rotary scaling has its usual factor, whatever the configuration says."""
    correct = rotary._llama3
    return patch.object(rotary, "_llama3", lambda frequencies, scaling: correct(frequencies, {**scaling, "factor": 8.0}))


def window_one_longer() -> AbstractContextManager[object]:
    """A query sees as many positions as its window has, and its own beside them."""
    correct = llama.score_rule

    def score_rule(*args: Any) -> ScoreRule:
        rule = correct(*args)
        return replace(rule, window=rule.window + 1) if rule.window else rule

    return patch.object(llama, "score_rule", score_rule)


def norms_decay() -> AbstractContextManager[object]:
    """Weight decay applies to the weights of norms."""
    correct = Shapes._vector
    return patch.object(Shapes, "_vector", lambda *args, **options: replace(correct(*args, **options), decay=True))


def eps_beside_the_root() -> AbstractContextManager[object]:
    """Norms add eps to the root of the mean square, and not below the root."""

    def inverse_rms(x: Tensor, eps: float) -> Tensor:
        return 1.0 / (x.square().mean(-1, keepdim=True).sqrt() + eps)

    return patch.object(ops, "inverse_rms", inverse_rms)


def conversations_see_each_other() -> AbstractContextManager[object]:
    """Conversations that share a sample attend to those before them."""
    correct = Stage.positions

    def positions(self: Stage, length: int, device: torch.device, position_ids: Tensor | None, *documents: Any) -> Positions:
        return correct(self, length, device, position_ids)

    return patch.object(Stage, "positions", positions)


def padding_trained() -> AbstractContextManager[object]:
    """What pads a sample behind its last conversation is in the loss."""
    correct = ExampleSamples.batch

    def batch(self: ExampleSamples, indices: Sequence[int]) -> Batch:
        found = correct(self, indices)
        assert found.loss_mask is not None and found.document_ids is not None
        counts = torch.tensor([len(self._rows[index]) for index in indices])
        return replace(found, loss_mask=torch.where(found.document_ids == counts, 1.0, found.loss_mask))

    return patch.object(ExampleSamples, "batch", batch)


def clipped_with_the_loss_scale() -> AbstractContextManager[object]:
    """fp16 gradients are clipped while they are multiplied by the loss scale."""
    correct = OverlappedDistributedOptimizer.step

    def step(self: OverlappedDistributedOptimizer, lr: Any, *, clip: float, skip_update: Tensor | None = None) -> StepResult:
        return correct(self, lr, clip=clip / float(self.loss_scale.value), skip_update=skip_update)

    unannounced = patch.object(OverlappedDistributedOptimizer, "announce_step", lambda self, lr, clip: None)
    return _together(unannounced, patch.object(OverlappedDistributedOptimizer, "step", step))


def step_count_forgotten() -> AbstractContextManager[object]:
    """A resumed run counts Adam's updates from zero."""
    correct = native.load

    def load(path: str | Path, loaded: OverlappedDistributedOptimizer, *args: Any, **options: Any) -> TrainState:
        state = correct(path, loaded, *args, **options)
        for count in step_counts(loaded):
            count.zero_()
        return state

    return patch.object(native, "load", load)


def data_from_the_start() -> AbstractContextManager[object]:
    """A resumed run reads its samples again from the first one."""
    correct = native.load
    return patch.object(native, "load", lambda *args, **options: replace(correct(*args, **options), consumed_samples=0))


def moments_forgotten_in_another_layout() -> AbstractContextManager[object]:
    """A run that is resumed with another tensor parallel size starts with an optimizer that has seen nothing."""
    correct = native.load

    def load(path: str | Path, loaded: OverlappedDistributedOptimizer, mesh: Mesh, *args: Any, **options: Any) -> TrainState:
        state = correct(path, loaded, mesh, *args, **options)
        if native.read_meta(path).config["parallel"]["tensor_model_parallel_size"] != mesh.tp.size:
            loaded.reset()
        return state

    return patch.object(native, "load", load)


def exported_as_tied() -> AbstractContextManager[object]:
    """The exported config.json says that the head is the embedding, which it is not."""
    correct = carried_config
    return patch.object(writer, "carried_config", lambda *args, **options: correct(*args, **options) | {"tie_word_embeddings": True})


def offloaded_gradient_of_the_step_before() -> AbstractContextManager[object]:
    """The optimizer on the host reads its gradients before they have arrived: it has those of the step before."""
    correct = ExactOffload.on_reduced

    def on_reduced(self: ExactOffload, bucket: int, grad: Tensor, *, speculative_lr: float | None) -> None:
        before = self.__dict__.setdefault("before", {})
        late = before.get(bucket, grad)
        before[bucket] = grad.clone()
        correct(self, bucket, late, speculative_lr=speculative_lr)

    return patch.object(ExactOffload, "on_reduced", on_reduced)


def last_step_dropped() -> AbstractContextManager[object]:
    """A run of passes ends before the step that has too few samples left."""

    def without_the_last(*args: Any, **options: Any) -> Config:
        found = with_epochs(*args, **options)
        steps = found.training.train_samples // found.training.global_batch_size
        return replace(found, training=replace(found.training, train_iters=steps))

    return patch.object(inputs, "with_epochs", without_the_last)


def empty_places_trained() -> AbstractContextManager[object]:
    """The places that the last step of passes leaves empty hold samples of the next pass, which count."""
    return patch.object(loader, "_counting", lambda batch, count: batch)


def cut_conversations_masked() -> AbstractContextManager[object]:
    """Of a conversation that is too long for a sample no label counts."""
    correct = ExampleSamples.batch

    def batch(self: ExampleSamples, indices: Sequence[int]) -> Batch:
        found = correct(self, indices)
        assert found.loss_mask is not None
        longest = [max(len(self._examples.ids[number]) for number in self._rows[index]) for index in indices]
        fits = torch.tensor(longest) <= self._seq_length
        return replace(found, loss_mask=found.loss_mask * fits)

    return patch.object(ExampleSamples, "batch", batch)


def ends_of_answers_masked() -> AbstractContextManager[object]:
    """The token with which a template ends an answer is not trained."""
    correct = ChatTokenizer._answers

    def answers(
        self: ChatTokenizer, template: ChatTemplate, example: Conversation, whole: Rendered, loss_on: LossOn
    ) -> Sequence[tuple[int, int]]:
        spans = correct(self, template, example, whole, loss_on)
        return [(start, whole.text.rindex("<|", start, stop)) for start, stop in spans]

    return patch.object(ChatTokenizer, "_answers", answers)


def weights_of_a_blend_ignored() -> AbstractContextManager[object]:
    """All datasets of a blend are read equally often, whatever their weights."""
    correct = BlendedSamples.__init__
    return patch.object(BlendedSamples, "__init__", lambda self, parts, weights: correct(self, parts, [1] * len(parts)))


def documents_at_the_offset_of_the_first() -> AbstractContextManager[object]:
    """In Megatron's order every document of a sample begins where the sample begins in its first one."""
    correct = MegatronStream.sample

    def sample(self: MegatronStream, index: int) -> NDArray[np.int64]:
        tokens = correct(self, index)
        position = int(self._samples[index]) * self.seq_length
        place = int(np.searchsorted(self._ends, position, side="right"))
        offset = position - (int(self._ends[place - 1]) if place else 0)
        rest = int(self._ends[place]) - position
        return np.concatenate((tokens[:rest], np.roll(tokens[rest:], -offset)))

    return patch.object(MegatronStream, "sample", sample)


def experts_scaled_by_ranks() -> AbstractContextManager[object]:
    """The gradient of an expert, to which all ranks that divide the experts have sent their tokens, is multiplied by their number."""
    correct = GradientBuckets._finalize

    def complete(self: GradientBuckets, bucket: int) -> None:
        self.shards[bucket].mul_(self.bucket_plan.buckets[bucket].kind.ep)
        correct(self, bucket)

    return patch.object(GradientBuckets, "_finalize", complete)


def clip_counts_experts_of_one_rank() -> AbstractContextManager[object]:
    """The gradient norm takes experts for copies over all data-parallel ranks, and counts those of the first one alone."""
    correct = OverlappedDistributedOptimizer._take_squared_norm

    def take(self: OverlappedDistributedOptimizer, bucket: int) -> Tensor:
        squared_norm = correct(self, bucket)
        if self.mesh.dp_replica.rank:
            self._squared_norms[bucket].zero_()
        return squared_norm

    return patch.object(OverlappedDistributedOptimizer, "_take_squared_norm", take)


def tokens_of_own_experts() -> AbstractContextManager[object]:
    """The gradient of a token is what the experts on its own rank make of it: gathered tokens are taken for copies."""
    return patch.object(dispatch, "gather_sequence", _GatheredAsCopies.apply)


class _GatheredAsCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        full, gathering = autograd.start_all_gather(shard, axis)
        gathering.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size)[ctx.axis.rank].clone(), None


def router_of_own_experts() -> AbstractContextManager[object]:
    """A router learns only from the experts of its own rank."""

    def backward(ctx: Any, experts: None, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad.chunk(ctx.ep.size)[ctx.ep.rank].clone(), None

    return patch.object(dispatch._Table, "backward", staticmethod(backward))


def weights_of_sent_tokens_untrained() -> AbstractContextManager[object]:
    """The weights that travel with a token to the ranks of its experts have no gradient there that comes back: no router is trained."""
    return patch.object(exchange._Table, "backward", staticmethod(lambda ctx, experts, grad: (None,) * 5))


@contextmanager
def tokens_sent_for_each_expert() -> Iterator[None]:
    """A token is sent once for each of its experts on a rank, and each time all of these compute it, so that their outputs count twice."""
    correct = exchange.Exchange

    def with_room(ep: Axis, sent: Any, received: Any, most: int) -> exchange.Exchange:
        return correct(ep, sent, received, 2 * most)

    def ranks(experts: Tensor, count: int, size: int) -> Tensor:
        return (experts // count).sort(dim=-1).values

    with patch.object(exchange, "ranks_of", ranks), patch.object(exchange, "Exchange", with_room):
        yield


def router_in_bf16() -> AbstractContextManager[object]:
    """The logits by which experts are chosen are rounded to bf16."""
    correct = routing._Logits.forward

    def logits(ctx: Any, *args: Any) -> Tensor:
        exact = correct(ctx, *args)
        return exact.bfloat16().to(exact.dtype)

    return patch.object(routing._Logits, "forward", staticmethod(logits))


def experts_weights_not_normalized() -> AbstractContextManager[object]:
    """The weights of a token's experts are their probabilities, which do not add up to one, whatever config.json says."""
    return patch.object(moe_block, "Router", lambda top_k, normalize, score: Router(top_k, normalize=False, score=score))


def weights_on_the_inputs_of_experts() -> AbstractContextManager[object]:
    """A token is multiplied by the weight of its expert before the expert, and not after it."""
    correct = expert_mlp

    def weigh_inputs(x: Any, chosen: Routing, *args: Any, **options: Any) -> Tensor:
        value = x.value if isinstance(x, Recomputable) else x
        per_token = chosen.experts.shape[1]
        weights = chosen.weights.reshape(-1, 1)
        weighted = value.flatten(0, -2).repeat_interleave(per_token, 0) * weights
        alone = chosen._replace(experts=chosen.experts.reshape(-1, 1), weights=torch.ones_like(weights))
        out = correct(weighted, alone, *args, **options)
        return out.view(*value.shape[:-1], per_token, -1).sum(-2)

    return patch.object(moe_block, "expert_mlp", weigh_inputs)


def experts_not_summed() -> AbstractContextManager[object]:
    """Each tp rank keeps the gradient of router and experts through its own part of the sequence."""
    return _not_summed(experts, "expert_params")


def outputs_in_sorted_order() -> AbstractContextManager[object]:
    """Outputs of experts go back to their tokens by the order in which rows were sorted, and not by its inverse."""
    return patch.object(ExpertRows, "places", lambda self: self.order)


SMALL: Mapping[str, object] = {
    "vocab_size": 360, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "seq_length": 32, "micro_batch_size": 4, "global_batch_size": 4, "lr": 1e-3, "weight_decay": 0.1,
}  # fmt: skip
"""360 tokens are padded to 384, and over two tensor-parallel ranks to 512."""
DOCUMENTS: Mapping[str, object] = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def _case(name: str, world_size: int = 1, *, sft: bool = False, documents: bool = False, **options: object) -> Case:
    return Case(name, {**SMALL, **(DOCUMENTS if documents else {}), **options}, world_size, sft)


SHARED: Mapping[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TENSOR = _case("tensor and sequence", 2, **SHARED, model_type="qwen3", qk_norm="head", attention_bias=True, num_key_value_heads=1)
"""Norms of heads, biases, and a key/value head that both ranks hold."""
PADDED = _case("padding token", 2, tensor_model_parallel_size=2, pad_token_id=-1)
"""The last token, which ends every document; with 512 rows for 360 tokens each rank has one with that number."""
EXPERTS = _case(
    "experts", 2, **SHARED, model_type="qwen3_moe", qk_norm="head", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
LOW_RANK = _case("low-rank additions", 2, **SHARED, lora_rank=4)
CONTEXT = _case("context", 2, context_parallel_size=2, cp_comm_type="ring", documents=True)
RING = _case("ring of three", 3, context_parallel_size=3, cp_comm_type="ring", seq_length=36)
WINDOW = _case("window over chunks", 2, context_parallel_size=2, model_type="mistral", sliding_window=13)
"""Chunks of 8 tokens, so that the window reaches into two before a token's own."""
STAGES: Mapping[str, Any] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"}
TIED: Mapping[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": True, "recompute_granularity": "full", "micro_batch_size": 2}
PIPELINE = _case("pipeline", 2, **STAGES, **TIED)
DATA = _case("data", 2, data_parallel_sharding_strategy="optim", micro_batch_size=1, documents=True)
SHARDS: Mapping[str, Any] = {"data_parallel_sharding_strategy": "optim_grads", "data_parallel_shard_size": 1}
REPLICAS = _case("replicas and offload", 2, **SHARDS, optimizer_offload="exact", micro_batch_size=2)
CHOSEN: Mapping[str, Any] = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DIVIDING: Mapping[str, Any] = {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "no_shard", "micro_batch_size": 2}
DIVIDED = _case("divided experts", 2, **CHOSEN, **DIVIDING)
EXCHANGED = _case("exchanged tokens", 2, **CHOSEN, **DIVIDING, moe_token_dispatcher_type="alltoall")
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ALONE = _case("one process", model_type="mistral", sliding_window=9, rope_scaling=LLAMA3)
CONVERSATIONS = _case("conversations", sft=True, packing=True)
HALF = _case("fp16", fp16=True)
PASSES = _case("passes", 2, sft=True, epochs=1.6, micro_batch_size=1)
"""The last step has one sample, and one of the two ranks none."""
TEMPLATE = _case("built-in template", sft=True, chat_template="chatml", seq_length=96)
BLEND = _case("blend", data_path=("0.7", "a", "0.3", "b"))
MEGATRON = _case("Megatron's order", megatron_data_order=True)


@dataclass(frozen=True)
class Fault:
    """A mistake, and the case in which it shows."""

    patch: Patch
    issue: str
    """The public issue that it is modelled on: owner/repository#number of GitHub."""
    case: Case
    check: str
    """The first check of a proof that finds it."""
    axis: str = ""
    """The axis without which it is not there; empty where one process has it, too."""

    @property
    def name(self) -> str:
        """What it is called in tests and tables."""
        return self.patch.__name__.replace("_", " ")

    @property
    def does(self) -> str:
        """What goes wrong."""
        return " ".join(str(self.patch.__doc__).split())

    @property
    def link(self) -> str:
        """The issue's address. GitHub sends the reader on where it is a pull request."""
        repository, number = self.issue.split("#")
        return f"https://github.com/{repository}/issues/{number}"


ONE, HF = "one process", "transformers"
SP, TP, CP, DP = "sequence parallelism", "tensor parallelism", "context parallelism", "data parallelism"
EP, EXCHANGE, MICRO = "expert parallelism", "the exchange of tokens", "microbatches"

CATALOGUE: tuple[Fault, ...] = (
    Fault(norms_not_summed, "NVIDIA/Megatron-LM#1446", TENSOR, ONE, SP),
    Fault(head_norms_not_summed, "NVIDIA-NeMo/RL#3716", TENSOR, ONE, TP),
    Fault(shared_heads_not_summed, "bigcode-project/Megatron-LM#37", TENSOR, ONE, TP),
    Fault(clip_counts_copies, "NVIDIA-NeMo/RL#3788", TENSOR, ONE, TP),
    Fault(bias_on_every_rank, "huggingface/text-generation-inference#1036", TENSOR, ONE, TP),
    Fault(logits_of_other_ranks, "modelscope/ms-swift#9947", TENSOR, ONE, TP),
    Fault(tokens_of_other_ranks, "deepseek-ai/DeepSeek-V3#298", TENSOR, ONE, TP),
    Fault(padding_row_of_every_rank, "pytorch/torchtitan#4637", PADDED, ONE, TP),
    Fault(padding_of_the_vocabulary, "unslothai/unsloth#10616", TENSOR, ONE, TP),
    Fault(low_rank_halves_not_summed, "modelscope/mcore-bridge#173", LOW_RANK, ONE, TP),
    Fault(low_rank_spread_of_a_shard, "NVIDIA-NeMo/Megatron-Bridge#5840", LOW_RANK, ONE, TP),
    Fault(positions_in_rank_order, "NVIDIA/Megatron-LM#560", CONTEXT, ONE, CP),
    Fault(documents_forgotten, "axolotl-ai-cloud/axolotl#3608", CONTEXT, ONE, CP),
    Fault(own_block_in_the_second_hop, "huggingface/diffusers#14265", RING, ONE, "the ring of keys and values"),
    Fault(window_in_the_chunk_before, "open-lm-engine/lm-engine#447", WINDOW, ONE, CP),
    Fault(labels_shifted_after_the_split, "NVIDIA-BioNeMo/bionemo-recipes#1449", CONTEXT, ONE, CP),
    Fault(tied_ends_not_summed, "uw-syfi/piper#13", PIPELINE, ONE, "pipeline parallelism"),
    Fault(virtual_stages_rank_by_rank, "NVIDIA/Megatron-LM#1584", PIPELINE, ONE, "the pipeline's schedule and split"),
    Fault(recomputed_from_the_layer_before, "NVIDIA/Megatron-LM#290", PIPELINE, ONE, "recomputation"),
    Fault(divided_by_ranks_again, "meta-pytorch/torchtune#2172", DATA, ONE, DP),
    Fault(weights_of_the_step_before, "NVIDIA/Megatron-LM#950", DATA, ONE, DP),
    Fault(sent_in_bf16, "deepspeedai/DeepSpeed#5170", DATA, ONE, DP),
    Fault(norm_of_the_own_shard, "sgl-project/SpecForge#663", DATA, ONE, DP),
    Fault(data_repeated, "coqui-ai/Trainer#144", DATA, ONE, DP),
    Fault(schedule_in_processes, "huggingface/accelerate#2926", DATA, ONE, DP),
    Fault(mean_of_ranks, "huggingface/transformers#34242", DATA, ONE, DP),
    Fault(mean_of_microbatches, "pytorch/torchtitan#2206", DATA, ONE, MICRO),
    Fault(gradient_of_the_last_microbatch, "allenai/open-instruct#1498", DATA, ONE, MICRO),
    Fault(last_microbatch_dropped, "EvolvingLMMs-Lab/Otter#304", DATA, ONE, MICRO),
    Fault(replicas_not_summed, "verl-project/verl#7493", REPLICAS, ONE, "replicas of shards"),
    Fault(shards_not_zeroed, "deepspeedai/DeepSpeed#8601", REPLICAS, ONE, "sharding"),
    Fault(offloaded_gradient_of_the_step_before, "deepspeedai/DeepSpeed#1219", REPLICAS, ONE, "offload"),
    Fault(experts_scaled_by_ranks, "NVIDIA/Megatron-LM#5956", DIVIDED, ONE, EP),
    Fault(clip_counts_experts_of_one_rank, "NVIDIA/Megatron-LM#5916", DIVIDED, ONE, EP),
    Fault(tokens_of_own_experts, "NVIDIA-NeMo/Automodel#1260", DIVIDED, ONE, EP),
    Fault(router_of_own_experts, "huggingface/transformers#48687", DIVIDED, ONE, EP),
    Fault(weights_of_sent_tokens_untrained, "deepspeedai/DeepSpeed#8213", EXCHANGED, ONE, EXCHANGE),
    Fault(tokens_sent_for_each_expert, "deepspeedai/DeepSpeed#2074", EXCHANGED, ONE, EXCHANGE),
    Fault(rope_factor_of_8, "NVIDIA/Megatron-LM#6305", ALONE, HF),
    Fault(window_one_longer, "NVIDIA-NeMo/Megatron-Bridge#2656", ALONE, HF),
    Fault(norms_decay, "ServiceNow/Fast-LLM#542", ALONE, HF),
    Fault(eps_beside_the_root, "allenai/OLMo#281", ALONE, HF),
    Fault(padding_token_trained, "google/torchax#11", PADDED, HF, "the padding token"),
    Fault(conversations_see_each_other, "hiyouga/LlamaFactory#2289", CONVERSATIONS, HF),
    Fault(padding_trained, "01-ai/Yi#110", CONVERSATIONS, "data"),
    Fault(clipped_with_the_loss_scale, "Lightning-AI/pytorch-lightning#9599", HALF, "precision"),
    Fault(step_count_forgotten, "deepspeedai/DeepSpeed#564", ALONE, "resume"),
    Fault(data_from_the_start, "KempnerInstitute/KempnerForge#51", ALONE, "resume"),
    Fault(moments_forgotten_in_another_layout, "ServiceNow/Fast-LLM#436", TENSOR, "reshard"),
    Fault(exported_as_tied, "huggingface/transformers#42612", ALONE, "export"),
    Fault(last_step_dropped, "NVIDIA-NeMo/Megatron-Bridge#4147", PASSES, "data"),
    Fault(empty_places_trained, "Smith42/astroPT#72", PASSES, "data"),
    Fault(cut_conversations_masked, "huggingface/trl#6668", PASSES, "data"),
    Fault(ends_of_answers_masked, "huggingface/trl#5988", TEMPLATE, "data"),
    Fault(weights_of_a_blend_ignored, "NVIDIA-NeMo/Nemotron#78", BLEND, "data"),
    Fault(documents_at_the_offset_of_the_first, "NVIDIA/Megatron-LM#1145", MEGATRON, "data"),
    Fault(experts_not_summed, "NVIDIA/Megatron-LM#619", EXPERTS, ONE, TP),
    Fault(router_in_bf16, "marin-community/marin#4234", EXPERTS, HF),
    Fault(experts_weights_not_normalized, "pytorch/torchtitan#1448", EXPERTS, HF),
    Fault(weights_on_the_inputs_of_experts, "vllm-project/vllm#16744", EXPERTS, HF),
    Fault(outputs_in_sorted_order, "pytorch/torchtitan#1340", EXPERTS, ONE, TP),
)


def with_fault(place: Place, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a job of the pool with a fault of the catalogue in the package."""
    (fault,) = (fault for fault in CATALOGUE if fault.name == name)
    with fault.patch():
        return function(place, *args)


class _FaultyPool:
    def __init__(self, pool: WorkerPool, fault: Fault) -> None:
        self._pool = pool
        self._fault = fault

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """See WorkerPool."""
        return self._pool.run(world_size, with_fault, self._fault.name, function, *args, **options)


def faulty(pool: WorkerPool, fault: Fault) -> WorkerPool:
    """Return the pool with a fault in the package wherever it runs a job."""
    return cast(WorkerPool, _FaultyPool(pool, fault))
