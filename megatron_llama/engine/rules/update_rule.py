"""Update rules: the interface of an optimizer for the engine, and AdamW.

A rule sees flat shards. It knows nothing of the model, of slots, or of communication. The rule
decides where the fp32 masters live, on which processor and when they change; the engine only waits
for the Future that ``step`` returns before it gathers a shard.

AdamW implements the five abstract methods. The other methods are for rules that work in their own
threads or put updates off (``engine/offload``); by default they do nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.options import EIGHT_BIT, UpdateOptions
from megatron_llama.engine.plan.buckets import BucketKind, Segment
from megatron_llama.engine.plan.limits import UPDATE_PIECE, keeps_fp32
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.engine.rules.moments import Moment, Tables, open_moment


@dataclass(frozen=True)
class Shard:
    """One rank's part of a bucket, as a rule takes charge of it."""

    bucket: int
    position: int
    """Its place in the order in which a forward pass first needs the buckets."""
    param_shard: Tensor
    """[n] on the device, in the compute dtype: the source of the all-gather. The rule writes it
    whenever the master has changed."""
    master_dtype: torch.dtype
    """The dtype of master and gradient."""
    kind: BucketKind
    segments: tuple[Segment, ...]
    """The parts of parameters that the shard holds. Padding lies between them; its gradient is
    zero."""


@dataclass(frozen=True)
class ColumnState:
    """State that a rule keeps for each column (input channel) of one parameter, for checkpoints."""

    spec: ParamSpec
    first: int
    """The first column that this tensor-parallel rank has, of all columns of the matrix."""
    total: int
    """The number of columns over all tensor-parallel ranks."""
    updates: Tensor
    """Number of updates of each column, fp64 [columns of this rank], live."""
    selected: Tensor
    """1 for the columns that the rule has selected, else 0, fp64 [columns of this rank], live."""


class UpdateRule(ABC):
    """An optimizer for the shards of some buckets.

    In a step of the engine each bucket gets ``on_reduced`` and then ``step``, during backward or
    after the norm is known; ``end_step`` follows once; ``before_grad_reuse`` comes before the next
    gradient of the bucket is written. The methods are called by one thread at a time, and on a
    device the current stream is the one in which the arguments are computed.
    """

    is_async: bool = False
    """Whether ``step`` only starts work in threads of the rule. The engine then gathers through a
    queue that can wait for sources, and may update a bucket whose slot has other users."""
    averages: bool = False
    """Whether the model is evaluated, saved and exported with other weights than it is trained
    with: with the masters, which ``show_average`` shows, while ``param_shard`` has the others."""
    needs_whole_step: bool = False
    """Whether a bucket may only be updated when every gradient of the step is known to be finite or
    not: an update that needs data of other ranks cannot leave out the shard of one rank."""

    takes_options: bool = False
    """Whether the numbers of its groups may change between steps, beside the learning rate."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The tensors that the rule has allocated on the device beside masters and state."""
        return ()

    @abstractmethod
    def attach(self, shard: Shard) -> Tensor:
        """Take charge of a shard. Returns its master [n] in ``shard.master_dtype``, wherever the
        rule keeps it; this may be ``param_shard`` itself."""

    @abstractmethod
    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """Update the master with ``grad / scale`` and write ``param_shard``; where ``skip`` is 1,
        change nothing.

        ``scale`` and ``skip`` are 0-dim tensors on the device: the host never learns them within a
        step. ``param_shard`` is not read between the call and the end of the returned Future, which
        may be waited for once, several times, or never."""

    @abstractmethod
    def refresh(self, bucket: int) -> None:
        """Write ``param_shard`` at once: master and state have been written while nothing was in
        flight, or an evaluation is over."""

    @abstractmethod
    def state(self, bucket: int) -> dict[str, Tensor]:
        """Return the live state by name: tensors [n]; tensors [n / ALIGN] with a number for each
        block of a matrix's row; and 0-dim tensors that are equal on all ranks, ``step`` among
        them."""

    @abstractmethod
    def reset(self) -> None:
        """Return to the state before the first step. The masters keep their values."""

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        """Update with other betas, eps and weight decay from now on. Called between two updates of
        every bucket, and only where ``takes_options`` is set."""

    def show_average(self, bucket: int) -> None:
        """Copy the master to ``param_shard`` at once, for an evaluation; nothing is in flight.
        Without ``averages`` it is there anyway."""

    def on_reduced(self, bucket: int, grad: Tensor, *, speculative_lr: float | None) -> None:
        """Note that the reduced gradient [n] of the step is final; it stays until
        ``before_grad_reuse``. ``speculative_lr`` is the learning rate if only the norm is unknown
        (most likely the step will have scale 1 and no skip), else None."""

    def before_grad_reuse(self, bucket: int) -> None:
        """Wait until the gradient that ``on_reduced`` announced last is not read any more (on a
        device: make the current stream wait): the engine is about to overwrite it."""

    def discard(self) -> None:
        """Drop the gradients that ``on_reduced`` has announced since the last ``end_step``: others
        replace them."""

    def end_step(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """End the step: every bucket has had its ``step`` with these arguments. ``steps`` ends when
        all those calls have returned. Called by the thread that computes; may be collective over
        all ranks."""

    def settle(self) -> Mapping[int, Future]:
        """Apply all updates that were put off beyond their step. Returns the buckets whose
        ``param_shard`` changes by that, and when each has changed. All ranks that share a bucket
        return the same buckets."""
        return {}

    def column_state(self) -> Sequence[ColumnState]:
        """Return the state of single columns for a checkpoint, complete after ``settle``."""
        return ()

    def progress(self) -> Tensor | None:
        """Return a live fp64 vector with the rule's position in its own schedule, equal on all
        ranks and complete after ``settle``; None if it has no schedule."""
        return None

    def resume(self, step: int) -> None:
        """Continue from ``column_state`` and ``progress`` as they have been written. ``step`` is
        the number of earlier updates, which counts where ``progress`` is zero."""

    def close(self, timeout: float = 0.0) -> None:
        """End the rule's threads after the work they still have, and wait for each at most
        ``timeout`` seconds. May be called again."""


@dataclass(frozen=True)
class UpdateRules:
    """The update rules of a rank's buckets."""

    by_bucket: list[UpdateRule]
    """The rule of each bucket; that of a frozen bucket is never asked."""
    distinct: list[UpdateRule]
    """Each rule once. A rule without a bucket on this rank belongs to them too, because its
    ``end_step`` may be collective."""


def adamw_step(
    master: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    options: UpdateOptions,
    *,
    decay: float,
    scale: Tensor,
    skip: Tensor | None,
    lr: float,
) -> None:
    """Make one AdamW step in place (decoupled weight decay, Loshchilov and Hutter, 2019) with
    ``grad / scale``, by torch's fused kernel; ``grad`` is scaled in place too.

    The kernel reads everything once, and applies the clip factor and the skip itself. It is called
    directly because the code of ``torch.optim`` around it takes longer than the update of a small
    shard."""
    step = state["step"].add_(1.0)
    torch._fused_adamw_(
        [master],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [step],
        amsgrad=False,
        lr=lr,
        beta1=options.adam_beta1,
        beta2=options.adam_beta2,
        weight_decay=decay,
        eps=options.adam_eps,
        maximize=False,
        grad_scale=scale,
        found_inf=skip,
    )
    if skip is not None:
        # The kernel leaves a skipped step's moments alone, but ``step`` has been counted before.
        step.sub_(skip)


def rounded_adamw_step(
    master: Tensor,
    grad: Tensor,
    first: Moment,
    second: Moment,
    step: Tensor,
    options: UpdateOptions,
    *,
    decay: float,
    scale: Tensor,
    skip: Tensor,
    lr: float,
) -> None:
    """Make the step of ``adamw_step`` with moments that are kept in fewer bits, computing in the
    master's dtype. ``step`` counts the updates.

    It goes in pieces, so that few moments exist in both at once. A skipped step changes no bit."""
    count = step.clone()
    # Whole moments in the master's dtype would take the memory that fewer bits have saved.
    for start in range(0, master.numel(), UPDATE_PIECE):
        piece = slice(start, min(start + UPDATE_PIECE, master.numel()))
        # Every piece is of the same step.
        step.copy_(count)
        state = {"exp_avg": first.read(piece), "exp_avg_sq": second.read(piece), "step": step}
        adamw_step(
            master[piece], grad[piece], state, options, decay=decay, scale=scale, skip=skip, lr=lr
        )
        first.keep(piece, state["exp_avg"], step=step, skip=skip)
        second.keep(piece, state["exp_avg_sq"], step=step, skip=skip)


class AdamW(UpdateRule):
    """AdamW on the device that has the shards: one fused call for each bucket."""

    takes_options = True

    def __init__(self, groups: Sequence[UpdateOptions]) -> None:
        """``groups`` has betas, eps, weight decay and the precision of moments of each group of
        parameters."""
        self._groups = tuple(groups)
        self._shards: dict[int, Shard] = {}
        self._masters: dict[int, Tensor] = {}
        self._moments: dict[int, tuple[Moment, Moment]] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self._tables: Tables | None = None

    @property
    def buffers(self) -> Sequence[Tensor]:
        return () if self._tables is None else self._tables.tensors

    def attach(self, shard: Shard) -> Tensor:
        param_shard = shard.param_shard
        # In fp32 training the shard is its own master: there is nothing to copy after an update.
        master = (
            param_shard
            if param_shard.dtype == shard.master_dtype
            else torch.zeros_like(param_shard, dtype=shard.master_dtype)
        )
        options = self._groups[shard.kind.group]
        kept = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
        if EIGHT_BIT in kept and self._tables is None:
            self._tables = Tables.on(master.device)
        tables = None if keeps_fp32(shard.kind) else self._tables
        first = open_moment(master, kept[0], tables, signed=True)
        second = open_moment(master, kept[1], tables, signed=False)
        self._shards[shard.bucket] = shard
        self._masters[shard.bucket] = master
        self._moments[shard.bucket] = first, second
        self._states[shard.bucket] = {
            **{f"exp_avg{suffix}": tensor for suffix, tensor in first.tensors.items()},
            **{f"exp_avg_sq{suffix}": tensor for suffix, tensor in second.tensors.items()},
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
        }
        return master

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        shard = self._shards[bucket]
        options = self._groups[shard.kind.group]
        master = self._masters[bucket]
        state = self._states[bucket]
        decay = options.weight_decay if shard.kind.decay else 0.0
        first, second = self._moments[bucket]
        if not runs_kernels(master.device, master.dtype):
            if all(tensor.dtype == master.dtype for tensor in state.values() if tensor.dim()):
                adamw_step(master, grad, state, options, decay=decay, scale=scale, skip=skip, lr=lr)
            else:
                rounded_adamw_step(
                    master,
                    grad,
                    first,
                    second,
                    state["step"],
                    options,
                    decay=decay,
                    scale=scale,
                    skip=skip,
                    lr=lr,
                )
            self.refresh(bucket)
            return CompletedFuture()
        # Triton exists on GPUs only. Its kernel writes the shard in the compute dtype as well.
        from megatron_llama.engine.rules.adamw_kernel import adamw

        adamw(
            master,
            grad,
            first.kept,
            second.kept,
            state["step"],
            None if shard.param_shard is master else shard.param_shard,
            scale=scale,
            skip=skip,
            lr=lr,
            beta1=options.adam_beta1,
            beta2=options.adam_beta2,
            decay=decay,
            eps=options.adam_eps,
            tables=self._tables,
        )
        return CompletedFuture()

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        self._groups = tuple(groups)

    def refresh(self, bucket: int) -> None:
        param_shard = self._shards[bucket].param_shard
        master = self._masters[bucket]
        if param_shard is not master:
            param_shard.copy_(master)

    def state(self, bucket: int) -> dict[str, Tensor]:
        return self._states[bucket]

    def reset(self) -> None:
        for state in self._states.values():
            for tensor in state.values():
                tensor.zero_()
