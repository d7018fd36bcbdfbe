"""Muon for sharded matrices: orthogonalised momentum (Jordan et al., 2024; learning rates as in Liu
et al., "Muon is Scalable for LLM Training", 2025, section 2.2), to the bit the results of
torch.optim.Muon with the same gradients and the HuggingFace model's matrices.

    step        Each rank updates the momentum of its shard, and sends what is to be orthogonalised
                to the owners of the matrices, in bf16: torch casts it as its first act, too.
    end_step    The owners orthogonalise what has arrived, matrix by matrix, and send each rank the
                elements that it came with. Every rank then updates its shard.

``engine/plan/muon.py`` decides the owners. The buckets go through these stages one behind the
other, in forward order, so that messages of some are under way while others are orthogonalised. On
the host a thread does all of this, and the next forward pass begins when its first weights are
there. On a device the calling thread issues it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.exchange import Exchange, Piece, transfer
from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.comm.worker import Worker
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.muon import Matrix, MuonPlan, muon_plan
from megatron_llama.engine.plan.specs import HFSlice
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import AdamW, Shard, UpdateRule, UpdateRules

EPS = 1e-7
"""The least norm by which a matrix is divided, as in torch.optim.Muon."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""As in torch.optim.Muon: a, b and c of X <- a X + (b X X^T + c (X X^T)^2) X."""
WIDE_ELEMENTS = 2**20
"""Elements of a matrix that are in fp32 at once where the processor does not multiply bf16."""


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return, by Newton-Schulz, a matrix with the singular vectors of ``matrix`` [m, n], bf16, and
    singular values around 1. ``matrix`` is overwritten. The operations are those of
    torch.optim.Muon, in its order, so the bits are the same where the processor multiplies bf16."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=EPS))
    if devices.widens_bf16(matrix):
        _iterate_in_fp32(matrix, steps)
        return matrix
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _iterate_in_fp32(matrix: Tensor, steps: int) -> None:
    """Run Newton-Schulz on a bf16 matrix of norm 1, in place. X X^T and its square are not rounded.

    A step multiplies all columns by one square matrix, so some at a time are widened: with two
    square matrices that is no more memory than torch's operations take in bf16."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    short = min(matrix.shape)
    blocks = torch.split(matrix, max(1, WIDE_ELEMENTS // short), dim=0 if is_tall else 1)
    for _ in range(steps):
        gram = matrix.new_zeros(short, short, dtype=torch.float32)
        for block in blocks:
            wide = block.float()
            gram.addmm_(wide.T if is_tall else wide, wide if is_tall else wide.T)
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        for block in blocks:
            wide = block.float()
            block.copy_(wide @ factor if is_tall else factor @ wide)


def rate_factor(adjust: str, shape: tuple[int, int]) -> float:
    """Return the factor of a matrix's learning rate by --muon-adjust-lr."""
    rows, columns = shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass
class _Update:
    """The arguments of ``step``, and the end of the update: a Future."""

    scale: Tensor
    skip: Tensor
    lr: float
    options: UpdateOptions
    """Those of this step: the next one may have others before a thread has ended it."""
    device: torch.device

    def __post_init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._applied: torch.Event | None = None

    def finish(self) -> None:
        """End the update: the shard has its new values, or will when the stream comes here."""
        if not devices.is_host(self.device):
            self._applied = devices.current_stream(self.device).record_event()
        self._finished.set()

    def fail(self, error: BaseException) -> None:
        """Let all waits raise the error."""
        self._error = error
        self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        if self._applied is not None:
            devices.current_stream(self.device).wait_event(self._applied)


@dataclass
class _Bucket:
    """One bucket on its way."""

    matrices: tuple[Matrix, ...]
    dp: Axis
    """The ranks that share the bucket."""
    buffer: Tensor
    """[n], bf16: the elements for the owners, then the returned ones, in the places of the
    shard."""
    to_owners: Exchange
    """Along dp."""
    along_tp: Exchange
    """Parts of matrices to the tensor-parallel rank that owns them."""
    back_along_tp: Exchange
    back: Exchange
    """Along dp."""
    copies_to_owner: list[tuple[Tensor, Tensor]]
    copies_along_tp: list[tuple[Tensor, Tensor]]
    """(target, source) of parts that stay on this rank. They go back the other way round."""
    whole: list[tuple[Matrix, list[Tensor]]]
    """Matrices that this rank orthogonalises, with the flat part of each tensor-parallel rank."""
    shard: Shard | None = None
    master: Tensor | None = None
    state: dict[str, Tensor] | None = None
    update: _Update | None = None
    begun: Future = field(default_factory=CompletedFuture)
    """The end of the reading of the gradient."""


def muon_rules(inputs: RuleInputs) -> UpdateRules:
    """Build Muon for the matrices of blocks, and AdamW for the rest."""
    groups = inputs.options.groups
    chunk_bytes = inputs.options.chunk_bytes
    muon = Muon(groups, inputs.tp_bucket_plans, inputs.mesh, chunk_bytes=chunk_bytes)
    adamw = AdamW(groups)
    kinds = [bucket.kind for bucket in inputs.bucket_plan.buckets]
    return UpdateRules([muon if kind.muon else adamw for kind in kinds], [muon, adamw])


class Muon(UpdateRule):
    """Muon for the buckets of a plan. All ranks that share buckets, or the matrices in them, call
    its methods in the same order."""

    is_async = True
    needs_whole_step = True
    takes_options = True

    def __init__(
        self,
        groups: Sequence[UpdateOptions],
        bucket_plans: Sequence[BucketPlan],
        mesh: Mesh,
        *,
        chunk_bytes: int,
    ) -> None:
        """``groups`` has momentum, decay and the other options of each group of parameters;
        ``bucket_plans`` are those of all tensor-parallel ranks, in their order."""
        self._groups = tuple(groups)
        self._mesh = mesh
        self._device = mesh.device
        self._plan = plan = muon_plan(bucket_plans[mesh.tp.rank], tp=mesh.tp.size)
        self._on_host = devices.is_host(mesh.device)
        self._buffers = {
            "shards": self._empty(plan.shard_numel),
            "gathered": self._empty(plan.gathered_numel),
            "whole": self._empty(plan.whole_numel),
        }
        self._placements = _placements(bucket_plans, mesh.tp.size)
        self._buckets = self._make_buckets(chunk_bytes)
        communicates = mesh.dp_shard.size > 1 or mesh.tp.size > 1
        self._begun: list[tuple[_Bucket, _Update]] = []
        """What ``step`` has begun since the last ``end_step``: frozen buckets are left out."""
        self._worker = Worker("muon") if self._on_host and communicates and self._buckets else None

    def _empty(self, numel: int) -> Tensor:
        # Zeros: the padding of a shard is not sent, but it is multiplied like all elements.
        return torch.zeros(numel, dtype=torch.bfloat16, device=self._device)

    def _make_buckets(self, chunk_bytes: int) -> dict[int, _Bucket]:
        """Cut the buffers into parts, and make the messages of each bucket, in forward order."""
        plan = self._plan
        tp = self._mesh.tp
        # Made once, with views of the buffers: a step allocates nothing and computes no offsets.
        shards = _taking(self._buffers["shards"])
        gathered = _taking(self._buffers["gathered"])
        whole = _taking(self._buffers["whole"])
        made = {}
        for bucket in plan.buckets:
            dp = self._mesh.data_axes(plan.bucket_plan.buckets[bucket].kind).shard
            buffer = shards(plan.bucket_plan.shard_numel(bucket))
            sent: list[Piece] = []
            received: list[Piece] = []
            own: list[tuple[Tensor, Tensor]] = []
            tp_sent: list[Piece] = []
            tp_received: list[Piece] = []
            tp_back: list[Piece] = []
            tp_returned: list[Piece] = []
            tp_own: list[tuple[Tensor, Tensor]] = []
            mine: list[tuple[Matrix, list[Tensor]]] = []
            for matrix in plan.of(bucket):
                held = plan.part(matrix, dp.rank)
                here = buffer[held.in_shard : held.in_shard + held.length]
                if matrix.owner != dp.rank:
                    if held.length:
                        sent.append((matrix.owner, here))
                    continue
                local = here
                if dp.size > 1:
                    local = gathered(matrix.numel)
                    for rank, part in plan.parts(matrix):
                        place = local[part.in_matrix : part.in_matrix + part.length]
                        if rank == dp.rank:
                            own.append((place, here))
                        else:
                            received.append((rank, place))
                parts = [local]
                if tp.size > 1:
                    # One of the ranks with the same part sends it, and all of them need the result.
                    senders = matrix.senders(tp.size)
                    if tp.rank != matrix.tp_owner:
                        if tp.rank in senders:
                            tp_sent.append((matrix.tp_owner, local))
                        tp_returned.append((matrix.tp_owner, local))
                        continue
                    flat = whole(matrix.numel * len(senders))
                    parts = list(flat.chunk(len(senders)))
                    for rank in range(tp.size):
                        part_of_rank = parts[rank // matrix.copies]
                        if rank == tp.rank:
                            tp_own.append((part_of_rank, local))
                            continue
                        if rank in senders:
                            tp_received.append((rank, part_of_rank))
                        tp_back.append((rank, part_of_rank))
                mine.append((matrix, parts))
            # Reductions and gathers have the numbers of their buckets.
            number = len(plan.bucket_plan.buckets) + bucket

            def message(
                outgoing: list[Piece],
                incoming: list[Piece],
                *,
                along_tp: bool,
                phase: int,
                number: int = number,
                dp: Axis = dp,
            ) -> Exchange:
                return transfer(
                    outgoing,
                    incoming,
                    tp if along_tp else dp,
                    self._device,
                    operation=("matrices to owners", "matrices from owners")[phase],
                    index=number,
                    phase=phase,
                    chunk_bytes=chunk_bytes,
                )

            made[bucket] = _Bucket(
                plan.of(bucket),
                dp,
                buffer,
                to_owners=message(sent, received, along_tp=False, phase=0),
                along_tp=message(tp_sent, tp_received, along_tp=True, phase=0),
                back_along_tp=message(tp_back, tp_returned, along_tp=True, phase=1),
                back=message(received, sent, along_tp=False, phase=1),
                copies_to_owner=own,
                copies_along_tp=tp_own,
                whole=mine,
            )
        return made

    @property
    def buffers(self) -> Sequence[Tensor]:
        return tuple(self._buffers.values())

    @property
    def plan(self) -> MuonPlan:
        """The owners of the matrices."""
        return self._plan

    def attach(self, shard: Shard) -> Tensor:
        param_shard = shard.param_shard
        # In fp32 training the shard is its own master, as with AdamW.
        master = (
            param_shard
            if param_shard.dtype == shard.master_dtype
            else torch.zeros_like(param_shard, dtype=shard.master_dtype)
        )
        work = self._buckets[shard.bucket]
        work.shard = shard
        work.master = master
        work.state = {
            "momentum_buffer": torch.zeros_like(master),
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
        }
        return master

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        work = self._buckets[bucket]
        assert work.shard is not None
        options = self._groups[work.shard.kind.group]
        work.update = update = _Update(scale, skip, lr, options, self._device)
        self._begun.append((work, update))

        def begin() -> None:
            try:
                self._begin(work, grad, update)
            except BaseException as error:
                update.fail(error)
                raise

        if self._worker is None:
            begin()
        else:
            work.begun = self._worker.submit(begin)
        return update

    def _begin(self, work: _Bucket, grad: Tensor, update: _Update) -> None:
        """Update the momentum, and send it, or its Nesterov form, to the owners."""
        assert work.state is not None
        options = update.options
        momentum = work.state["momentum_buffer"]
        if self._on_host and update.skip:
            # The gradient stays as it is. Divided by a scale that is NaN, a bucket's padding, which
            # no backward pass writes, would be NaN in all later steps.
            work.buffer.copy_(momentum)
        else:
            grad.div_(update.scale)
            weight: float | Tensor = 1 - options.muon_momentum
            if not self._on_host:
                # The host never learns of the skip: the momentum moves by 0, towards 0.
                grad.masked_fill_(update.skip.bool(), 0.0)
                weight = (weight * (1 - update.skip)).to(grad.dtype)
            momentum.lerp_(grad, weight)
            work.state["step"].add_(1 - update.skip)
            if options.muon_nesterov:
                # In place: this is the last read of the gradient of this step.
                work.buffer.copy_(grad.lerp_(momentum, options.muon_momentum))
            else:
                work.buffer.copy_(momentum)
        for target, source in work.copies_to_owner:
            target.copy_(source)
        work.to_owners.start()

    def end_step(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        # The engine asks for buckets in forward order, as all ranks do.
        order, self._begun = self._begun, []
        if not order:
            return
        if self._worker is None:
            self._finish(order)
        else:
            self._worker.submit(lambda: self._finish(order))

    def _finish(self, order: Sequence[tuple[_Bucket, _Update]]) -> None:
        """Bring all buckets through the remaining stages, each stage ``lag`` buckets behind the one
        before it."""
        stages: list[Callable[[_Bucket, _Update], None]] = [self._orthogonalise_owned, self._apply]
        if self._mesh.tp.size > 1:
            stages = [
                self._collect_along_tp,
                self._orthogonalise_owned,
                self._return_along_tp,
                self._apply,
            ]
        lag = self._plan.lag
        try:
            for tick in range(len(order) + lag * (len(stages) - 1)):
                # The last stage first: complete buckets do not wait.
                for number, stage in reversed(list(enumerate(stages))):
                    at = tick - number * lag
                    if 0 <= at < len(order):
                        stage(*order[at])
        except BaseException as error:
            for _, update in order:
                update.fail(error)
            raise

    def _collect_along_tp(self, work: _Bucket, update: _Update) -> None:
        work.to_owners.wait()
        for target, source in work.copies_along_tp:
            target.copy_(source)
        work.along_tp.start()

    def _orthogonalise_owned(self, work: _Bucket, update: _Update) -> None:
        tp = self._mesh.tp.size > 1
        (work.along_tp if tp else work.to_owners).wait()
        steps = update.options.muon_num_ns_steps
        for matrix, parts in work.whole:
            if len(parts) == 1:
                whole = parts[0].view(matrix.shape)
                whole.copy_(orthogonalise(whole, steps))
                continue
            whole = torch.empty(matrix.shape, dtype=torch.bfloat16, device=self._device)
            places = list(self._in_whole(matrix, parts, whole))
            for place, rows in places:
                place.copy_(rows)
            result = orthogonalise(whole, steps)
            for place, rows in self._in_whole(matrix, parts, result):
                rows.copy_(place)
        if tp:
            work.back_along_tp.start()
        else:
            self._send_back(work)

    def _in_whole(
        self, matrix: Matrix, parts: Sequence[Tensor], whole: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each place of a whole matrix [m, n], with the rows of a part that belong there."""
        for flat, slices in zip(parts, self._placements[matrix.name], strict=True):
            rows = flat.view(matrix.rows, matrix.width)
            for piece in slices:
                first = piece.row - slices[0].row
                place = whole[piece.hf_row : piece.hf_row + piece.rows]
                yield (
                    place[:, piece.hf_col : piece.hf_col + matrix.width],
                    rows[first : first + piece.rows],
                )

    def _return_along_tp(self, work: _Bucket, update: _Update) -> None:
        work.back_along_tp.wait()
        for source, target in work.copies_along_tp:
            target.copy_(source)
        self._send_back(work)

    def _send_back(self, work: _Bucket) -> None:
        for source, target in work.copies_to_owner:
            target.copy_(source)
        work.back.start()

    def _apply(self, work: _Bucket, update: _Update) -> None:
        work.back.wait()
        assert work.shard is not None and work.master is not None
        options = update.options
        decay = options.weight_decay if work.shard.kind.decay else 0.0
        kept: float | Tensor = 1 - update.lr * decay
        master = work.master
        if not self._on_host:
            # A factor of 1 and a step of 0 leave every bit as it is.
            work.buffer.masked_fill_(update.skip.bool(), 0.0)
            kept = torch.where(update.skip.bool(), 1.0, kept)
        if not self._on_host or not update.skip:
            master.mul_(kept)
            for matrix in work.matrices:
                held = self._plan.part(matrix, work.dp.rank)
                place = slice(held.in_shard, held.in_shard + held.length)
                rate = update.lr * rate_factor(options.muon_adjust_lr, matrix.shape)
                if held.length:
                    master[place].add_(work.buffer[place], alpha=-rate)
            self.refresh(work.shard.bucket)
        update.finish()

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        self._groups = tuple(groups)

    def before_grad_reuse(self, bucket: int) -> None:
        # On a device all reads of the gradient are in the stream that writes the next one, or
        # before it.
        self._buckets[bucket].begun.wait()

    def settle(self) -> Mapping[int, Future]:
        """Wait for the updates: none is put off beyond its step."""
        for work in self._buckets.values():
            if work.update is not None:
                with self._mesh.recorder.waiting("Muon"):
                    work.update.wait()
        return {}

    def refresh(self, bucket: int) -> None:
        work = self._buckets[bucket]
        assert work.shard is not None and work.master is not None
        if work.shard.param_shard is not work.master:
            work.shard.param_shard.copy_(work.master)

    def state(self, bucket: int) -> dict[str, Tensor]:
        state = self._buckets[bucket].state
        assert state is not None
        return state

    def reset(self) -> None:
        for work in self._buckets.values():
            for tensor in (work.state or {}).values():
                tensor.zero_()

    def close(self, timeout: float = 0.0) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker.join(timeout)


def _taking(buffer: Tensor) -> Callable[[int], Tensor]:
    """Return a function that takes the next elements of a buffer."""
    rest = [buffer]

    def take(numel: int) -> Tensor:
        taken, rest[0] = rest[0][:numel], rest[0][numel:]
        return taken

    return take


def _placements(
    bucket_plans: Sequence[BucketPlan], tp: int
) -> dict[str, list[tuple[HFSlice, ...]]]:
    """Return the places of the rows of every part of each matrix, of one tensor-parallel rank for
    each part."""
    placements: dict[str, list[tuple[HFSlice, ...]]] = {}
    for rank, bucket_plan in enumerate(bucket_plans):
        for matrix in muon_plan(bucket_plan, tp=tp).matrices:
            if rank % matrix.copies == 0:
                placements.setdefault(matrix.name, []).append(matrix.slices)
    return placements
