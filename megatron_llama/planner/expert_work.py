"""The work of a block with experts, in integers: products, rows that are moved, messages, bytes.

Counts are those of equally loaded experts. Memory and messages are read from the plans of a run
(``model/plan/expert_memory.py``, ``model/plan/dispatch.py``): memory is that of the most uneven
load, and so are gathered messages and rows; exchanges are those of an equal one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.dispatch import Load, dispatch_messages, load_of, tokens_of_a_rank
from megatron_llama.model.plan.expert_memory import ExpertActivations
from megatron_llama.model.plan.experts import DOWN, GATE_UP, SHARED, is_sparse
from megatron_llama.model.plan.fp8 import ROUTER
from megatron_llama.model.plan.params import Shapes
from megatron_llama.model.plan.router_losses import count_messages
from megatron_llama.model.plan.tensor_messages import BlockMessages
from megatron_llama.planner.training_job import Matmul


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


def expert_work(config: Config) -> ExpertWork:
    """Return the work of a block with experts of a resolved configuration."""
    model = config.model
    granularity = config.parallel.recompute_granularity
    shape = Activations.from_config(config)
    assert isinstance(shape, ExpertActivations)
    tokens = tokens_of_a_rank(config)
    experts = model.num_experts
    # Exchanged rows are as many as are chosen; gathered ones are those that may be chosen.
    load = load_of(config) if shape.exchanges else shape.load
    moved = _Moved(shape, tokens, load)
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
        exchanges=shape.exchanges,
        counted=max(count_messages(config).values(), default=0),
        kept=shape.sparse_block(granularity),
        working=shape.gradients(granularity),
        numel=sum(map(prod, (gate_up, down))) // shape.ep,
        others_numel=sum(map(prod, (router, *shared))),
    )


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
    """Bytes that the operators of ``model/nn/moe`` read and write, without products: each operator
    by itself, since none is fused."""

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
        """Of an exchange there and back: tokens are gathered in the order of ranks, and what comes
        back is added up."""
        if not self.shape.exchanges:
            return 0
        return self.load.sent * self._gathered + self._sums(self.tokens, is_weighted=False)

    def _sums(self, tokens: int, *, is_weighted: bool) -> int:
        """Of the sums of the rows of so many tokens: each is looked up, widened, weighted and
        added."""
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
        """Of the shared expert: its activation, and the sum with the others."""
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
