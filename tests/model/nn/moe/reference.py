"""What a block of experts computes, token by token in fp64, and the tensors that it is tried with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Of a block: t tokens, E experts of which a token has k, width, inner width."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int

    def draw(self, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Leaves x [t, 1, h], the weights of router, gate with up, and down; and a gradient of the output. Numbers are those of ``dtype``."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

        return (
            normal(self.tokens, 1, self.hidden),
            normal(self.experts, self.hidden),
            normal(self.experts * 2 * self.inner, self.hidden, scale=self.hidden**-0.5),
            normal(self.experts * self.hidden, self.inner, scale=self.inner**-0.5),
            normal(self.tokens, 1, self.hidden).detach(),
        )


def chosen(scores: Tensor, top_k: int) -> Tensor:
    """The places of the largest scores of each token, found one at a time; of equal ones the first."""
    rest, found = scores.clone(), []
    for _ in range(top_k):
        found.append(rest.argmax(-1))
        rest[torch.arange(len(rest)), found[-1]] = -torch.inf
    return torch.stack(found, -1)


def block(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, *, normalize: bool) -> Tensor:
    """The block's output for a table of experts [t, k], token by token, for autograd."""
    hidden = x.shape[-1]
    count = len(router)
    first, second = gate_up.view(count, -1, hidden), down.view(count, hidden, -1)
    outputs = []
    for token, own in zip(x.flatten(0, -2), experts, strict=True):
        probabilities = (router @ token).softmax(0)
        total = probabilities[own].sum() if normalize else probabilities.new_ones(())
        output = torch.zeros_like(token)
        for expert in own.tolist():
            gate, up = (first[expert] @ token).chunk(2)
            output = output + probabilities[expert] / total * (second[expert] @ (F.silu(gate) * up))
        outputs.append(output)
    return torch.stack(outputs).view_as(x) if outputs else x * 0.0
