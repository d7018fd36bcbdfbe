"""The messages of tensor-parallel layers, counted from the plan of their pieces."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.model.plan.fp8 import gathers_codes
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.pieces import chosen_pieces, piece_spans


@dataclass(frozen=True)
class BlockMessages:
    """The messages over tp of one transformer block and one microbatch: number and bytes, of whole
    tensors as the recorder of a run counts them."""

    forward: int
    forward_bytes: int
    backward: int
    backward_bytes: int
    piece_bytes: int
    """The largest gathered piece: two of them exist at once in a forward pass."""


def sparse_block_messages(config: Config) -> BlockMessages:
    """Count the messages of a block with experts: those of attention, which are half of a dense
    block's, and the counts of a loss that balances the experts of a sequence. Tokens stay where
    they are."""
    from megatron_llama.model.plan.router_losses import count_messages  # of few models

    dense = block_messages(config)
    counts = count_messages(config).get("tp", 0)
    return BlockMessages(
        dense.forward // 2 + (counts > 0),
        dense.forward_bytes // 2 + counts,
        dense.backward // 2,
        dense.backward_bytes // 2,
        dense.piece_bytes,
    )


def block_messages(config: Config) -> BlockMessages:
    """Count the messages of a block without recomputation and low-rank additions, all of whose
    weights are trained; of one in FP8, if there are any, without the messages of its scales
    (``model/plan/fp8.py``). ``config`` is resolved."""
    parallel = config.parallel
    training = config.training
    tp = parallel.tensor_model_parallel_size
    if tp == 1:
        return BlockMessages(0, 0, 0, 0, 0)
    rows = training.seq_length // parallel.context_parallel_size
    row_bytes = training.micro_batch_size * config.model.hidden_size * compute_itemsize(config)
    stream = rows * row_bytes
    if not parallel.sequence_parallel:
        # Two sums forward, of the outputs, and two backward, of the inputs' gradients.
        sums = 2 * len(piece_spans(rows, chosen_pieces(config)))
        return BlockMessages(sums, 2 * stream, 2, 2 * stream, 0)
    spans = piece_spans(rows // tp, chosen_pieces(config))
    largest = max(span.stop - span.start for span in spans)
    # Of the two gathers of inputs forward, those of codes carry a byte for each number.
    saved = stream if gathers_codes(config) else 0
    # Backward a row-parallel layer gathers its gradient in pieces; a column-parallel one gathers
    # its input again, and scatters its sums, each under a product.
    return BlockMessages(
        forward=4 * len(spans),
        forward_bytes=4 * stream - saved,
        backward=2 * len(spans) + 4,
        backward_bytes=6 * stream,
        piece_bytes=tp * largest * row_bytes,
    )
