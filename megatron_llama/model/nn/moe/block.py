"""A mixture of experts in the place of a block's MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.model.nn.linear import empty_weight
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, Routing, route
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.experts import is_sparse

if TYPE_CHECKING:  # the stage imports this module where a model has experts
    from megatron_llama.model.llama import Block, StageOptions


class Gate(nn.Module):
    """The router: a row of weights for each expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rule = Router(
            config.num_experts_per_tok, config.norm_topk_prob, config.moe_router_score_function
        )
        self.weight = empty_weight(config.num_experts, config.hidden_size)

    def forward(self, x: Tensor | Recomputable) -> Routing:
        """Return the experts of x [s or s/tp, b, h]."""
        return route(x, self.weight, self.rule)


class Experts(nn.Module):
    """The matrices of the experts of a block (``model/plan/experts.py`` has their order): all, or
    those of this rank of ``ep``."""

    def __init__(
        self, config: ModelConfig, options: StageOptions, mesh: Mesh, *, recompute: bool
    ) -> None:
        super().__init__()
        self.gate = options.ops.gate(config.hidden_act)
        self.recompute = recompute
        self.on_input = config.moe_apply_probs_on_input
        ep = mesh.ep
        self.send: Callable[..., Tensor] = expert_mlp if ep is None else _sending(mesh, ep)
        """Sends tokens through their experts."""
        count = config.num_experts // (1 if ep is None else ep.size)
        inner = config.moe_intermediate_size
        self.gate_up_proj = empty_weight(2 * count * inner, config.hidden_size)
        self.down_proj = empty_weight(count * config.hidden_size, inner)

    def forward(self, x: Tensor | Recomputable, routing: Routing) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        weights = self.gate_up_proj, self.down_proj
        return self.send(
            x, routing, *weights, self.gate, recompute=self.recompute, on_input=self.on_input
        )


def _sending(mesh: Mesh, ep: Axis) -> Callable[..., Tensor]:
    """Return ``expert_mlp`` for experts that the ranks of ``ep`` divide among them."""
    # Few runs need one of these modules.
    if mesh.exchanges_tokens:
        from megatron_llama.model.nn.moe.exchange import exchanged_mlp

        return partial(exchanged_mlp, ep=ep)
    from megatron_llama.model.nn.moe.dispatch import dispatched_mlp

    return partial(dispatched_mlp, ep=ep)


class MoE(nn.Module):
    """Each token through some of the experts, as its router chooses. Along tp without
    communication: with sequence parallelism every rank has whole experts, and its own part of the
    tokens. Along ep tokens travel to their experts (``dispatch.py``, ``exchange.py``).

    With ``recompute``, all between the norm before it and its output is made again in backward."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: StageOptions, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, options, mesh, recompute=recompute)
        self.router_losses: Callable[[Routing, int], Routing] | None = None
        """Adds the choices for b sequences to the losses of a run (``balance.py``), if it has
        some."""
        self.shared_expert: nn.Module | None = None
        if config.moe_shared_expert_intermediate_size:
            from megatron_llama.model.nn.moe.shared import shared_expert  # of few models

            self.shared_expert = shared_expert(config, mesh, options, recompute=recompute)

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        routing: Routing = self.gate(x)
        if self.router_losses is not None:
            value = x.value if isinstance(x, Recomputable) else x
            routing = self.router_losses(routing, value.shape[1])
        out: Tensor = self.experts(x, routing)
        return out if self.shared_expert is None else out + self.shared_expert(x)


WAITING = (Gate, Experts)
"""The layers that wait for their weights themselves."""


def blocks_of(config: ModelConfig, layers: range, dense: type[Block]) -> list[type[Block]]:
    """Return the class of each layer's block: ``dense``, or the same with experts. Raises
    ConfigError for a changed block that has an MLP of its own."""
    from megatron_llama.model.llama import MLP  # which imports this module

    if dense.mlp_class is not MLP:
        raise ConfigError(
            flag("num_experts"),
            got=f"{config.num_experts} with a block whose MLP is {dense.mlp_class.__name__}",
            expected="blocks whose MLP experts may replace",
            do="leave mlp_class as it is, or train a dense model",
        )
    sparse: type[Block] = type(f"Sparse{dense.__name__}", (dense,), {"mlp_class": MoE})
    blocks = [sparse if is_sparse(config, layer) else dense for layer in layers]
    if config.attention_chunk_size:
        from megatron_llama.model.nn.chunked import with_chunks  # which few models have

        blocks = with_chunks(config, layers, blocks)
    return blocks
