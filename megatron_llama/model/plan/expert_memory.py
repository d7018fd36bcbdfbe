"""Bytes that autograd keeps of blocks with experts.

A token has as many rows as experts, whichever they are, and none is dropped. So the bytes of a
block do not depend on what the router chooses: the formula is what is allocated, for the most
uneven choice as for the most even one. Where ranks divide the experts, each has the tokens of all,
and of each token as many rows as it can have experts here. Where they exchange tokens, bytes do
depend on the choice: those are the most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megatron_llama.config.schema import Config
from megatron_llama.model.plan.activation_memory import ROTARY_BYTES, Activations
from megatron_llama.model.plan.chunks import Granularity
from megatron_llama.model.plan.dispatch import Load, largest_load, load_of
from megatron_llama.model.plan.experts import is_sparse, sparse_layers
from megatron_llama.model.plan.router_losses import NONE
from megatron_llama.model.windows import chunk_of

INDEX_BYTES = 8
"""The number of an expert, or of a row."""
END_BYTES = 4
"""The number of the row behind an expert's last."""
ELSEWHERE_BYTES = 1
"""Whether a place of a table has no row."""


def expert_activations(config: Config) -> Callable[..., ExpertActivations]:
    """Return the class of the activations of a run, which knows what is sent and which losses of
    routers are trained."""
    training = config.training
    return partial(
        ExpertActivations,
        ep=config.parallel.expert_model_parallel_size,
        load=load_of(config, largest_load),
        exchanges=config.parallel.exchanges_tokens,
        has_balance=training.moe_router_load_balancing_type != NONE,
        has_z_loss=training.moe_z_loss_coeff > 0,
    )


@dataclass(frozen=True)
class ExpertActivations(Activations):
    """The activations of a model in which some blocks have experts. With sequence parallelism a
    rank sends its part of the tokens through them."""

    ep: int = 1
    """Ranks that divide the experts."""
    load: Load = field(kw_only=True)
    """What one of these ranks has, for the most uneven choice."""
    exchanges: bool = False
    """Whether a token travels only to ranks that have some of its experts."""
    has_balance: bool = False
    has_z_loss: bool = False
    """Which losses of routers are trained."""

    def blocks(self, layers: range, granularity: Granularity) -> int:
        """Return the bytes of the blocks of some layers, dense ones and those with experts."""
        sparse = sum(is_sparse(self.model, layer) for layer in layers)
        dense = (len(layers) - sparse) * self.block(granularity)
        total = dense + sparse * self.sparse_block(granularity)
        if granularity == "full" or self.model.qk_norm != "l2":
            return total
        # Layers without positions have no norms of heads.
        return total - self._qk_norm * sum(not chunk_of(self.model, layer) for layer in layers)

    @property
    def rotary(self) -> int:
        """The rotary table, and the factors of queries in layers without positions."""
        if not self.model.attn_temperature_tuning:
            return super().rotary
        samples = self.micro_batch_size if self.positions_per_sample else 1
        return super().rotary + self.seq_length // self.cp * samples * ROTARY_BYTES

    def postponed_blocks(self, layers: range, granularity: Granularity) -> int:
        """Return the same between BACKWARD_INPUT and BACKWARD_WEIGHT."""
        sparse = sum(is_sparse(self.model, layer) for layer in layers)
        dense = (len(layers) - sparse) * self.postponed_block(granularity)
        return dense + sparse * self._postponed_sparse_block(granularity)

    @property
    def _received(self) -> int:
        """Bytes of the tokens of all ranks that come to this one, as many as its own without
        others."""
        return self.load.received * self.model.hidden_size * self.itemsize

    @property
    def _width(self) -> int:
        """Bytes of an expert's inner activation, of all rows."""
        return self.load.rows * self.model.moe_intermediate_size * self.itemsize

    @property
    def _shared(self) -> int:
        """Bytes of the shared expert's inner activation."""
        width = self.model.moe_shared_expert_intermediate_size
        return self._residual_tokens * width * self.itemsize

    @property
    def _logits(self) -> int:
        """Bytes of the probabilities of all experts, or of the gradients of their logits."""
        return self._residual_tokens * self.model.num_experts * self.fp32_itemsize

    @property
    def _places(self) -> int:
        """Places of the table of this rank's tokens and their experts."""
        return self._residual_tokens * self.model.num_experts_per_tok

    @property
    def _routing(self) -> int:
        """The experts of each token, their weights, and the probabilities of all; the experts and
        weights of the tokens that come from all ranks, where these divide the experts, and the
        order in which tokens are sent. Losses of routers keep a factor of each expert for each
        sequence, and the logarithm of the softmax's denominator of each token."""
        places = self._places
        if self.ep > 1:
            places += self.load.received * self.model.num_experts_per_tok
        choice = places * (INDEX_BYTES + self.fp32_itemsize) + self._logits
        choice += self.exchanges * self._places * (INDEX_BYTES + ELSEWHERE_BYTES)
        losses = self.has_balance * self.micro_batch_size * self.model.num_experts
        losses += self.has_z_loss * self._residual_tokens
        return choice + losses * self.fp32_itemsize

    def sparse_block(self, granularity: Granularity) -> int:
        """Return the bytes of one block with experts."""
        if granularity == "full":
            return self.block("full")
        # Of a dense block all but what its MLP keeps.
        others = self.block(granularity) - (2 if granularity == "selective" else 3) * self._inner
        # The output of the first product is computed again where activations are; that of the
        # shared expert is kept, as a dense block's.
        others += (2 if granularity == "selective" else 3) * self._shared
        if granularity == "none":
            others += 2 * self._width + (self._received if self.exchanges else 0)
        return others + self._routing

    def _postponed_sparse_block(self, granularity: Granularity) -> int:
        """Return one block with experts between BACKWARD_INPUT and BACKWARD_WEIGHT: of attention
        what a dense block keeps; the gradients of the router's logits and of both products, the
        input of the second, and the order of the rows."""
        inner = (4 if granularity == "selective" else 3) * self._inner
        others = self.postponed_block(granularity) - inner
        # The gradient of the output is that of this rank's part of the tokens.
        others -= (self.tokens - self._residual_tokens) * self.model.hidden_size * self.itemsize
        places = self.load.received * self.model.num_experts_per_tok
        order = places * INDEX_BYTES + self.model.num_experts // self.ep * END_BYTES
        if self.ep > 1:
            # Which experts are elsewhere, and the gradients of the outputs of all ranks' tokens.
            order += places * ELSEWHERE_BYTES + self._received - self.hidden
            if granularity == "selective" or self.exchanges or self.model.moe_apply_probs_on_input:
                # These tokens: kept, or sent once for several uses.
                order += self._received
        others += (4 if granularity == "selective" else 3) * self._shared
        return others + self._logits + 3 * self._width + order

    def gradients(self, recomputed: Granularity) -> int:
        """Return the most bytes of gradients in the backward pass of a block: of a dense one, if
        there is one, or of one with experts, whichever has more."""
        dense = sparse_layers(self.model) < self.model.num_hidden_layers
        sparse = self.sparse_gradients(recomputed)
        return max(sparse, self.dense_gradients(recomputed) if dense else 0)

    def dense_gradients(self, recomputed: Granularity) -> int:
        """Return the same of a dense block."""
        return super().gradients(recomputed)

    def sparse_gradients(self, recomputed: Granularity, fp8: str = "none") -> int:
        """Return the same of a block with experts: the gradients and both factors of one product
        exist at once. ``fp8``: the recipe by which it multiplies.

        A plan is made before a device is known, so it has what a host needs: it copies factors of
        two dtypes to fp32, sums rows in fp32, and makes codes of numbers in fp32. Where Triton's
        kernels run, none of these exist (but for the last with one scale a tensor): there it is an
        upper bound."""
        width = self._width
        hidden = self.load.rows * self.model.hidden_size * self.itemsize
        # Of a product of two dtypes a host copies both factors to fp32.
        copies = 3 if self.itemsize < self.fp32_itemsize else 1
        wide = copies * self.fp32_itemsize
        second = 2 * width + width // self.itemsize * wide
        # The gradients of rows, which are summed over the experts of a token in fp32. Then the rows
        # are gathered again for the weight gradient, or before for those of weights of inputs.
        sums = 2 * self._received // self.itemsize * self.fp32_itemsize
        if self.model.moe_apply_probs_on_input:
            sums = max(sums, hidden + hidden // self.itemsize * wide)
        first = 2 * width + max(sums, self._received)
        # Tokens of all ranks, gradients of their outputs and of themselves. Of those that are
        # exchanged the first are kept, or are among what is made again.
        gathered = (2 if self.exchanges else 3) * self._received if self.ep > 1 else 0
        again = self.sparse_block("none") - self.sparse_block(recomputed)
        # The gradients of output and residual stream wait.
        products = hidden + max(first, second)
        # Of the shared expert: both inner gradients and that of their product.
        kept = 3 * self._shared
        shared = again + kept
        if fp8 != "none":
            from megatron_llama.model.plan.expert_fp8 import row_code_bytes  # of few models

            codes, more_codes = (
                row_code_bytes(fp8, self.load.rows, columns)
                for columns in (self.model.hidden_size, 2 * self.model.moe_intermediate_size)
            )
            # The gradient of the outputs with the activation, then that of the first product: each
            # is in fp32 while its codes are made, and gone when the product is.
            in_fp32 = self.fp32_itemsize // self.itemsize
            products = max(
                products,
                hidden + width + codes + max(in_fp32 * hidden, width),
                2 * width + more_codes + max(2 * in_fp32 * width, hidden),
            )
            inner = self.model.moe_shared_expert_intermediate_size
            shared += row_code_bytes(fp8, self._residual_tokens, 2 * inner)
        # A host's gated activation multiplies its gradient by one half before the other.
        experts = again + gathered + max(products, 4 * width) + 2 * self.hidden
        if not self._shared:
            return experts
        # The shared expert's backward pass comes before that of the others, and leaves its input's
        # gradient in place of all that it kept.
        return max(shared, experts + self.hidden - kept)
