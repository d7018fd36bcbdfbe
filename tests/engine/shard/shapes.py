"""Modules that do what models may do: share, freeze, branch, recompute, nest. Their sizes are no multiples of anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from tests.engine.shard.twins import LABELS, Inputs, LlamaDecoderLayer, Output, Twin, llama, own_loss, text, vectors

WIDTH = 23


class Block(nn.Module):
    """One block of the tower: it adds what it computes to what it gets."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 37)
        self.down = nn.Linear(37, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, width] to the same."""
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Blocks between two linear layers. Subclasses walk them in their own ways."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(48, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(depth)])
        self.outlet = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        """The mean loss over the samples."""
        return Output(cross_entropy(self.outlet(self.trunk(self.inlet(x))), labels))

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, one after the other."""
        for block in self.blocks:
            x = block(x)
        return x


def shared_weight() -> nn.Module:
    """Two units with one weight."""
    model = Tower()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def shared_module() -> nn.Module:
    """A block that is used before and after another, as in ALBERT."""
    model = Tower()
    model.blocks[2] = model.blocks[0]
    return model


def frozen() -> nn.Module:
    """A root part, a unit and a part of a unit are not trained."""
    model = Tower()
    for each in (model.inlet, model.blocks[1], model.blocks[2].up, model.blocks[3].norm.bias):
        each.requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    """No gradient flows into the first blocks."""
    model = Tower()
    for each in (model.inlet, model.blocks[0], model.blocks[1]):
        each.requires_grad_(False)
    return model


def several_forwards(model: nn.Module, inputs: Inputs) -> Tensor:
    """Two passes forward, then one back."""
    return (own_loss(model, inputs) + own_loss(model, inputs | {"x": inputs["x"].flip(0) * 0.5})) / 2


def with_a_teacher(model: nn.Module, inputs: Inputs) -> Tensor:
    """A pass without gradients before the pass with them, and another one between that and backward."""
    with torch.no_grad():
        taught = own_loss(model, inputs)
    loss = own_loss(model, inputs)
    with torch.no_grad():
        again = own_loss(model, inputs)
    assert torch.equal(again, loss) and torch.equal(taught, loss)
    return loss * (1 + taught)


class Recomputed(Tower):
    """Each unit is computed again in backward. ``reentrant``: which of torch's two kinds does it."""

    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.reentrant = reentrant

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputedTogether(Recomputed):
    """Two units are computed again at once, so in the order of forward."""

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, in pairs."""
        for first in range(0, len(self.blocks), 2):
            x = checkpoint(self.pair, x, first, use_reentrant=self.reentrant)
        return x

    def pair(self, x: Tensor, first: int) -> Tensor:
        """Two blocks."""
        return self.blocks[first + 1](self.blocks[first](x))


class RecomputedInside(Tower):
    """A part of each unit is computed again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        for number in range(len(self.blocks)):
            self.blocks[number] = PartlyRecomputed(reentrant)


class PartlyRecomputed(Block):
    """Keeps nothing of its inner width."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """See Block."""
        return x + self.down(checkpoint(self.wide, x, use_reentrant=self.reentrant))

    def wide(self, x: Tensor) -> Tensor:
        """[b, width] to [b, 37]."""
        return torch.tanh(self.up(self.norm(x)))


def recomputed_llama(reentrant: bool) -> nn.Module:
    """As HuggingFace's users ask for it."""
    model = llama(num_hidden_layers=3)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def compiled(backend: str = "aot_eager") -> nn.Module:
    """Each unit is a graph."""
    model = Tower()
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


class Branches(Tower):
    """Blocks of two branches take turns, so that backward goes through them in an order that is not that of forward turned round."""

    def trunk(self, x: Tensor) -> Tensor:
        """0 before 2 before 3, and 1 beside them."""
        left = self.blocks[0](x)
        right = self.blocks[1](x)
        left = self.blocks[3](self.blocks[2](left))
        return left * torch.sigmoid(right)


class Skips(Tower):
    """What early blocks compute is read by late ones, as in a U-Net."""

    def trunk(self, x: Tensor) -> Tensor:
        """The first half feeds the second, crosswise."""
        down = self.blocks[0](x)
        deep = self.blocks[1](down)
        up = self.blocks[2](deep) + deep
        return self.blocks[3](up + down) * down


class OtherOrder(torch.autograd.Function):
    """Computes its modules again in backward, each with a backward of its own, the first module first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, modules: nn.ModuleList) -> Tensor:
        """The sum of what the modules return."""
        ctx.save_for_backward(x)
        ctx.modules = modules
        return torch.stack([module(x) for module in modules]).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The sum of their gradients."""
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        for module in ctx.modules:
            with torch.enable_grad():
                part = x.detach().requires_grad_()
                out = module(part)
            torch.autograd.backward(out, gradients[0])
            assert part.grad is not None
            total += part.grad
        return total, None


class InOtherOrder(Tower):
    """Backward meets the blocks in the order of forward."""

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks beside each other."""
        out: Tensor = OtherOrder.apply(x, self.blocks)
        return out


class Scales(nn.Module):
    """Parameters of no dim, one, three, five, and without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.mix = nn.Parameter(torch.randn(3, WIDTH, 5) / 8)
        self.volume = nn.Conv3d(1, 3, 3, padding=1)
        self.nothing = nn.Parameter(torch.empty(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        """[b, WIDTH] to the same."""
        cubes = torch.einsum("bw,cwk->bck", x, self.mix).view(-1, 1, 3, 5, 1)
        return x * self.scale + self.shift * self.volume(cubes).mean((1, 2, 3, 4)).unsqueeze(1) + self.nothing.sum()


class AnyRank(Tower):
    """Such blocks, and parameters that the model itself holds."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.blocks[number] = Scales()
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.bias = nn.Parameter(torch.randn(1, 1, WIDTH) / 4)

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, then its own parameters."""
        return super().trunk(x) * self.temperature + self.bias[0]


class Containers(nn.Module):
    """Gets and returns tensors inside of others' containers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, carried: dict[str, Any], *, scale: float) -> dict[str, Any]:
        """``x`` in, ``x`` and what it was out."""
        x, old = carried["x"], carried["old"]
        return {"x": self.block(x) * scale, "old": [*old, x]}


class Carried(Tower):
    """Units that get and return dictionaries of lists."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(len(self.blocks)):
            self.blocks[number] = Containers()

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, then the mean of what they got."""
        carried: dict[str, Any] = {"x": x, "old": []}
        for block in self.blocks:
            carried = block(carried, scale=0.9)
        return torch.stack([carried["x"], *carried["old"]]).mean(0)


class Twice(Tower):
    """Each unit is called on what it has just returned."""

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, each two times."""
        for block in self.blocks:
            x = block(block(x))
        return x


class InPlace(Tower):
    """What a unit returns is changed in place."""

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
            x.mul_(0.9)
        return x


class ReadElsewhere(Tower):
    """The root reads the weight of one of its layers without calling it, in two ways."""

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks, and the first layer turned round."""
        x = super().trunk(x)
        return linear(linear(x, self.inlet.weight.t()), self.inlet.weight) / 4 + x * self.inlet.weight.square().mean()


class Towers(Tower):
    """Towers as blocks of a tower: units at three depths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Chain()
        self.blocks[3] = Chain()


class Chain(nn.Module):
    """A unit with units inside, and with a parameter of its own that it reads after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block() for _ in range(3)])
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """See Block."""
        for block in self.inner:
            x = block(x)
        return x * self.gain


def tower(build: Callable[..., nn.Module], *units: type[nn.Module], **options: Any) -> Twin:
    """A shape that is trained as a classifier of vectors."""
    return Twin(build, vectors, units or (Block,), **options)


SHAPES = {
    "plain": tower(Tower),
    "shared weight": tower(shared_weight),
    "shared module": tower(shared_module),
    "frozen": tower(frozen),
    "frozen first": tower(frozen_first),
    "several forwards": tower(Tower, loss=several_forwards),
    "with a teacher": tower(Tower, loss=with_a_teacher),
    "dropout": tower(partial(Tower, dropout=0.3)),
    "branches": tower(Branches),
    "skips": tower(Skips),
    "other order": tower(InOtherOrder),
    "any rank": tower(AnyRank, Block, Scales),
    "containers": tower(Carried, Containers),
    "twice": tower(Twice),
    "in place": tower(InPlace),
    "read elsewhere": tower(ReadElsewhere),
    "nested": tower(Towers, Chain, Block),
    "nested linears": tower(Tower, Block, nn.Linear),
    "every leaf": tower(Tower, nn.Linear, nn.LayerNorm),
    "one unit": tower(Tower, Tower),
    "no units": Twin(Tower, vectors, ()),
    "compiled": tower(compiled),
    **{f"recomputed {kind}": tower(partial(Recomputed, kind == "reentrant", dropout=0.3)) for kind in ("reentrant", "saved")},
    **{f"recomputed together {kind}": tower(partial(RecomputedTogether, kind == "reentrant")) for kind in ("reentrant", "saved")},
    **{
        f"recomputed inside {kind}": tower(partial(RecomputedInside, kind == "reentrant"), PartlyRecomputed)
        for kind in ("reentrant", "saved")
    },
    **{
        f"recomputed llama {kind}": Twin(partial(recomputed_llama, kind == "reentrant"), text, (LlamaDecoderLayer,))
        for kind in ("reentrant", "saved")
    },
}
