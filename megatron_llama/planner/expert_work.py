"""The work of a block with experts, in integers: products, rows that are moved, messages, bytes.

Counts are those of equally loaded experts. Memory and messages are read from the plans of a run
(``model/plan/expert_memory.py``, ``model/plan/dispatch.py``): memory is that of the most uneven
load, and so are gathered messages and rows; exchanges are those of an equal one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.dispatch import Load, dispatch_messages, load_of, tokens_of_a_rank
from megatron_llama.model.plan.expert_fp8 import SparseScales, row_code_bytes, sparse_scale_messages
from megatron_llama.model.plan.expert_memory import ExpertActivations
from megatron_llama.model.plan.experts import DOWN, GATE_UP, SHARED, is_sparse
from megatron_llama.model.plan.fp8 import (
    BLOCKWISE,
    ROUTER,
    SCALE_BYTES,
    SIDE,
    TENSORWISE,
    code_bytes,
    fp8_layers,
)
from megatron_llama.model.plan.params import Shapes
from megatron_llama.model.plan.router_losses import count_messages
from megatron_llama.model.plan.tensor_messages import BlockMessages
from megatron_llama.planner.training_job import Matmul

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class ExpertWork:
    """What a block with experts has in the place of an MLP: on one rank, for one microbatch."""

    ranks: int
    """Ranks that divide the experts, ep."""
    count: int
    """Experts of a rank."""
    grouped: tuple[Matmul, Matmul]
    """Forward products of one expert with the tokens that are sent to it."""
    shared: tuple[Matmul, ...]
    """Forward products of the expert of all tokens."""
    router: Matmul
    """Its forward product, which is at least in fp32."""
    moved: int
    """Bytes that a forward pass reads and writes without multiplying."""
    moved_back: int
    """Those of a backward pass."""
    moved_again: int
    """Those that selective recomputation adds to them."""
    messages: BlockMessages
    """Those over the ranks that divide experts."""
    recipe: str
    """That of --fp8."""
    coded: int
    """Bytes that a forward pass in FP8 reads and writes to make codes of rows."""
    coded_back: int
    """Those of a backward pass."""
    coded_again: int
    """Those that selective recomputation adds to them."""
    scales: Mapping[str, SparseScales]
    """The messages about scales of a block in FP8, by the name of the axis."""
    exchanges: bool
    """Whether they are exchanges, with counts for which the host waits."""
    counted: int
    """Bytes of the message that counts the tokens of a sequence; 0 without one."""
    kept: int
    """Bytes that autograd keeps of the whole block, as it recomputes."""
    working: int
    """Bytes for its backward pass besides."""
    numel: int
    """Elements of a rank's experts."""
    others_numel: int
    """Elements of router and shared expert."""

    def codes(self, product: Matmul) -> int:
        """Return the bytes of the codes and scales that a product of an expert reads."""
        rows = row_code_bytes(self.recipe, product.m, product.k)
        # The one order of two.
        return rows + code_bytes(product.n, product.k, self.recipe) // 2


def expert_work(config: Config, *, on_host: bool) -> ExpertWork:
    """Return the work of a block with experts of a resolved configuration. ``on_host``: torch's
    operators do what Triton's kernels do on a device."""
    model = config.model
    granularity = config.parallel.recompute_granularity
    shape = Activations.from_config(config)
    assert isinstance(shape, ExpertActivations)
    tokens = tokens_of_a_rank(config)
    experts = model.num_experts
    # Exchanged rows are as many as are chosen; gathered ones are those that may be chosen.
    load = load_of(config) if shape.exchanges else shape.load
    # Kernels have no fp64.
    is_fused = not on_host and shape.fp32_itemsize == FP32_BYTES
    moved = (_MovedByKernels if is_fused else _Moved)(shape, tokens, load)
    recipe = config.training.fp8
    number = load.rows * _bytes_of_codes(recipe)
    widths = model.hidden_size, model.moe_intermediate_size
    # Of a rank's experts, the tokens of all ranks that divide experts.
    rows = -(-shape.ep * tokens * model.num_experts_per_tok // experts)
    # Without the mapping ``rope_scaling`` a model is hashable.
    router, gate_up, down, *shared = _matrices(replace(model, rope_scaling=None))
    return ExpertWork(
        ranks=shape.ep,
        count=experts // shape.ep,
        grouped=(
            Matmul(rows, gate_up[0] // experts, gate_up[1]),
            Matmul(rows, down[0] // experts, down[1]),
        ),
        shared=tuple(Matmul(tokens, *matrix) for matrix in shared),
        router=Matmul(tokens, *router),
        moved=moved.forward,
        moved_back=moved.backward,
        moved_again=moved.again,
        messages=dispatch_messages(config, recomputed=granularity == "selective"),
        recipe=recipe,
        # Rows and activations; gradients of outputs, and of the output of the first product.
        coded=round(number * sum(widths)),
        coded_back=round(number * (widths[0] + 2 * widths[1])),
        coded_again=round(number * widths[0]),
        scales=sparse_scale_messages(config),
        exchanges=shape.exchanges,
        counted=max(count_messages(config).values(), default=0),
        kept=shape.sparse_block(granularity),
        working=shape.gradients(granularity),
        numel=sum(map(prod, (gate_up, down))) // shape.ep,
        others_numel=sum(map(prod, (router, *shared))),
    )


def _bytes_of_codes(recipe: str) -> float:
    """Return the bytes that move for each number of experts' rows when codes are made of it. With
    scales of tiles a kernel reads it and writes the code, and a scale for 128; all rows for which
    there is room, needed or not. With one scale a tensor torch's operators take the largest
    magnitude, and copy to fp32, scale and clamp in place, and round."""
    if recipe == BLOCKWISE:
        return BF16_BYTES + 1 + SCALE_BYTES / SIDE
    if recipe == TENSORWISE:
        return BF16_BYTES + (BF16_BYTES + FP32_BYTES) + 4 * FP32_BYTES + (FP32_BYTES + 1)
    return 0.0


def sparse_shares(config: Config, layers: range) -> tuple[float, float]:
    """Return the share of these blocks that have experts, and of those the share that multiplies in
    FP8, if any block does."""
    sparse = [layer for layer in layers if is_sparse(config.model, layer)]
    narrow = fp8_layers(config)
    is_mixed = bool(narrow) and bool(sparse)
    in_fp8 = sum(layer in narrow for layer in sparse) / len(sparse) if is_mixed else 1.0
    return len(sparse) / len(layers), in_fp8


@lru_cache(maxsize=8)
def _matrices(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of router, experts and shared expert: a search asks for each layout, and
    the table of parameters names each expert."""
    layer = next(layer for layer in range(model.num_hidden_layers) if is_sparse(model, layer))
    return tuple(spec.shape for spec in Shapes(model).block(layer).params if ".mlp." in spec.name)


def used_numel(spec: ParamSpec, model: ModelConfig, tp: int) -> float:
    """Return the elements of a block's weight that a token meets on one of ``tp`` ranks, on
    average: of experts those that it is sent to; and since each rank has whole experts, and router,
    for its part of the tokens, a share of these."""
    if spec.name.endswith((GATE_UP, DOWN)):
        experts = model.num_experts // spec.ep
        return spec.numel * model.num_experts_per_tok / experts / tp
    is_whole = spec.name.endswith(ROUTER) or SHARED in spec.name
    return spec.numel / tp if is_whole else float(spec.numel)


@dataclass(frozen=True)
class _Moved:
    """Bytes that the operators of ``model/nn/moe`` read and write, without products: torch's, each
    by itself. Numbers of rows, of experts and of places are left out."""

    shape: ExpertActivations
    tokens: int
    """Tokens of a rank."""
    load: Load
    """What comes to its experts, and their rows, those that no token needs included."""

    @property
    def forward(self) -> int:
        """Return those of a forward pass: logits of the router, rows gathered and activated,
        outputs summed."""
        model = self.shape.model
        routing = self.tokens * (self._hidden * self._cast + 3 * model.num_experts * self._wide)
        row = self._gathered + 3 * self._inner * self._narrow
        if model.moe_apply_probs_on_input:
            row += self._weighted * self._hidden
        outputs = self._sums(self.load.received, is_weighted=not model.moe_apply_probs_on_input)
        return routing + self.load.rows * row + outputs + self._exchanged + self._shared

    @property
    def backward(self) -> int:
        """Return those of a backward pass: rows of tokens and gradients gathered, activations
        made again and differentiated, and multiplied by gradients for those of the weights of
        outputs."""
        model = self.shape.model
        routing = self.tokens * self._hidden * 2 * self._cast
        products = self._cast + 3 * self._wide + self._narrow
        # The activation, the products, the weighted activation and gradient; that of both halves.
        inner = 3 * self._narrow + products + self._weighted + 2 * self._narrow + 5 * self._narrow
        row = 2 * self._gathered + inner * self._inner
        if model.moe_apply_probs_on_input:
            row += (self._weighted + products) * self._hidden - products * self._inner
        outputs = self._sums(self.load.received, is_weighted=model.moe_apply_probs_on_input)
        return routing + self.load.rows * row + outputs + self._exchanged + 2 * self._shared

    @property
    def again(self) -> int:
        """Return what selective recomputation adds: rows are gathered once more, and those to
        exchange."""
        return (self.load.rows + self.shape.exchanges * self.load.sent) * self._gathered

    @property
    def _exchanged(self) -> int:
        """Bytes of an exchange there and back: tokens are gathered in the order of ranks, and what
        comes back is added up."""
        if not self.shape.exchanges:
            return 0
        return self.load.sent * self._gathered + self._sums(self.tokens, is_weighted=False)

    def _sums(self, tokens: int, *, is_weighted: bool) -> int:
        """Return the bytes of the sums of the rows of so many tokens: each is looked up, widened,
        weighted and added."""
        row = 2 * self._narrow + self._cast + 3 * self._wide + is_weighted * 2 * self._wide
        if self.shape.ep > 1:
            # Those of experts elsewhere are set to zero.
            row += 2 * self._wide
        return tokens * self._hidden * (self._chosen * row + self._cast)

    @property
    def _chosen(self) -> int:
        return self.shape.model.num_experts_per_tok

    @property
    def _gathered(self) -> int:
        return 2 * self._hidden * self._narrow

    @property
    def _shared(self) -> int:
        """Bytes of the shared expert: its activation, and the sum with the others."""
        inner = self.shape.model.moe_shared_expert_intermediate_size
        return self.tokens * 3 * (inner + self._hidden) * self._narrow if inner else 0

    @property
    def _hidden(self) -> int:
        return self.shape.model.hidden_size

    @property
    def _inner(self) -> int:
        return self.shape.model.moe_intermediate_size

    @property
    def _narrow(self) -> int:
        return self.shape.itemsize

    @property
    def _wide(self) -> int:
        return self.shape.fp32_itemsize

    @property
    def _cast(self) -> int:
        """Return those of an element that is read narrow and written wide, if dtypes differ."""
        return self._narrow + self._wide if self._narrow < self._wide else 0

    @property
    def _weighted(self) -> int:
        """Return those of an element that a wide weight multiplies, and that is narrow again."""
        return self._narrow + self._wide + self._cast


class _MovedByKernels(_Moved):
    """Those where kernels of Triton do it (``model/nn/kernels/rows.py``, ``gate.py``), one pass
    each. Rows that no token needs are neither read nor written."""

    @property
    def forward(self) -> int:
        model = self.shape.model
        routing = self.tokens * (self._hidden * self._cast + 3 * model.num_experts * self._wide)
        rows = self._rows * (self._gathered + 3 * self._inner * self._narrow)
        outputs = self._summed(self._rows, self.load.received)
        return routing + rows + outputs + self._exchanged + self._shared

    @property
    def backward(self) -> int:
        """Return those of a backward pass: of each row two gathers, and the inner activation,
        made again; then, if weights multiply outputs, their gradients, the activation and its
        gradient with these weights; and the gradient of both halves. Weights of inputs have theirs
        from rows that are gathered once more."""
        model = self.shape.model
        routing = self.tokens * self._hidden * 2 * self._cast
        row = 2 * self._gathered + (3 + 5) * self._inner * self._narrow
        if model.moe_apply_probs_on_input:
            row += 2 * self._gathered
        else:
            row += 3 * 2 * self._inner * self._narrow
        outputs = self._summed(self._rows, self.load.received)
        return routing + self._rows * row + outputs + self._exchanged + 2 * self._shared

    @property
    def again(self) -> int:
        return (self._rows + self.shape.exchanges * self.load.sent) * self._gathered

    @property
    def _rows(self) -> int:
        """Rows of a rank's experts that tokens need, if experts are equally loaded."""
        return self.tokens * self._chosen

    @property
    def _exchanged(self) -> int:
        if not self.shape.exchanges:
            return 0
        return self.load.sent * self._gathered + self._summed(self.load.sent, self.tokens)

    def _summed(self, rows: int, tokens: int) -> int:
        """Return the bytes of rows that are read, and of their sums for so many tokens, which are
        written."""
        return (rows + tokens) * self._hidden * self._narrow
