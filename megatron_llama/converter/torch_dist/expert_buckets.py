"""Routers and experts in the distributed optimizer's flat buckets (``flat_buckets``).

Without expert parallelism they stand among the other parameters of their block. With it experts
have an optimizer and buffers of their own, one for each rank of expert-tensor, expert and pipeline
parallelism, in this order:

    chained_1.optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(P, D).bucket_idx_B.exp_avg

In a block an expert's two matrices follow each other, or, in grouped modules, the first ones of all
experts come before the second ones. Which it is, the boundaries in the file tell, and the masters
of the experts prove it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from megatron_llama.converter.torch_dist.experts import MATRICES, OWNER
from megatron_llama.converter.torch_dist.flat_buckets import (
    GATE_AND_UP,
    Boxes,
    FlatBuckets,
    Keys,
    Order,
    Stage,
    filled,
)
from megatron_llama.converter.torch_dist.names import HALVES, LAYERS
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.model.plan.experts import ROUTER, is_sparse

FIRST, SECOND = MATRICES.values()
DENSE, EXPERTS = "0", "1"
"""Numbers of the optimizers with expert parallelism."""


class ExpertBuckets:
    """The orders of routers and experts, and their places in the file."""

    def __init__(self, reader: TorchDistReader) -> None:
        args = reader.checkpoint.args
        tp = reader.checkpoint.tp
        self._model = reader.model
        self._tensors = reader.checkpoint.container.tensors
        self._ep = args.get("expert_model_parallel_size") or 1
        self._etp = args.get("expert_tensor_parallel_size") or tp
        self.has_own_optimizer = self._ep > 1
        """Whether experts have buffers of their own."""
        self.dense_optimizer = DENSE if self.has_own_optimizer else ""
        """The number of the optimizer of all other parameters."""

    def orders(self, others: Iterator[Order]) -> Iterator[Order]:
        """Yield the possible orders of a layer's parameters, by those of the other parameters."""
        for order in others:
            for grouped in (True, False):
                yield partial(self._in_layer, order, grouped)
                if self.has_own_optimizer:
                    break

    def _in_layer(self, order: Order, grouped: bool, layer: int) -> list[str]:
        leaves = list(order(layer))
        if not is_sparse(self._model, layer):
            return leaves
        leaves.append(ROUTER)
        if not self.has_own_optimizer:
            leaves += _matrices(range(self._model.num_experts), grouped)
        return leaves

    def stored(self, leaf: str, layer: int) -> Keys:
        """Return the keys of a router or of an expert's matrix."""
        fronts = ((LAYERS, (layer,)), (f"{LAYERS}{layer}.", ()))
        places = list[Keys]()
        if leaf == ROUTER:
            places += [((f"{front}mlp.router.weight", index),) for front, index in fronts]
        else:
            expert, module = _expert_and_module(leaf)
            stacked = f"{OWNER}{module}.weight"
            single = f"{OWNER}{expert}.{module}.weight"
            ends = HALVES if module == FIRST else ("",)
            places += [((front + stacked, (*index, expert)),) for front, index in fronts]
            for front, index in fronts:
                places.append(tuple((front + single + end, index) for end in ends))
        return next((p for p in places if all(key in self._tensors for key, _ in p)), ())

    def cut(self, leaf: str) -> tuple[bool, bool, int]:
        """Return whether ranks share a tensor by rows or by columns, and how many ranks do."""
        if leaf == ROUTER:
            return False, False, 1
        return leaf.endswith(GATE_AND_UP), leaf.endswith(SECOND), self._etp

    def add_boxes(self, flat: FlatBuckets, boxes: Boxes, stages: Sequence[Stage]) -> bool:
        """Add the boxes of all experts, and return whether their buffers have the expected
        parameters. Raises CheckpointError."""
        ranks = self._etp * self._ep
        buffers = flat.find_buffers(EXPERTS, ranks, f"etp {self._etp} x ep {self._ep}")
        own, rest = divmod(self._model.num_experts, self._ep)
        if rest or max(group for group, _ in buffers) // ranks < stages[-1].pp_rank:
            return False
        for stage in stages:
            layers = [layer for layer in stage.layers if is_sparse(self._model, layer)]
            for ep_rank in range(self._ep):
                experts = range(ep_rank * own, (ep_rank + 1) * own)
                for etp_rank in range(self._etp):
                    group = etp_rank + self._etp * (ep_rank + self._ep * stage.pp_rank)
                    buckets = buffers.get((group, stage.chunk), [])
                    for grouped in (True, False):
                        leaves = _matrices(experts, grouped)
                        blocks = [(leaf, layer) for layer in layers for leaf in leaves]
                        numel = {leaf: flat.part_numel(leaf, layer) for leaf, layer in blocks}
                        placed = filled(buckets, [*reversed(blocks)], numel)
                        if placed is not None:
                            break
                    else:
                        return False
                    for parameter in placed:
                        flat.add_boxes(boxes, parameter, etp_rank)
        return True


def _matrices(experts: Sequence[int], grouped: bool) -> list[str]:
    """Return the names of the experts' matrices in their order."""
    if grouped:
        return [f"{expert}.{module}" for module in (FIRST, SECOND) for expert in experts]
    return [f"{expert}.{module}" for expert in experts for module in (FIRST, SECOND)]


def _expert_and_module(leaf: str) -> tuple[int, str]:
    expert, _, module = leaf.partition(".")
    return int(expert), module
