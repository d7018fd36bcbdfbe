"""Distributed types, read off values: what the ranks of an axis hold of one tensor.

`R`: all of it, every rank the same bits. `S(d)`: the parts of dim d, in rank order. `Z`: the parts of dim 0 in zig-zag order
(``model/plan/zigzag.py``). `P`: terms; the tensor is their sum. `S(d) of R` and `S(d) of P`: neighbours that share a part, or the terms of one.

A ``Probe`` collects values and gradients at named points of a model. Names are HuggingFace's; a fused projection counts as its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron_llama.engine.plan.specs import HFSlice
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import AddRMSNorm, Attention, Block, Stage
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.embedding import VocabParallelEmbedding
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear
from megatron_llama.model.plan.run_params import rank_units
from megatron_llama.model.plan.zigzag import zigzag_chunks
from tools.overlap.loss import token_losses
from torch import Tensor, nn

from tests.model.nn.handle import Handle
from tests.parallel.cases import Layout, batch, trainer, whole_parameters

Values = dict[str, Tensor]
TOLERANCE = 1e-10
"""Largest difference between a sum or concatenation and the single process, relative to the tensor's largest element."""


SAMPLES = range(33, 36)
"""Documents end inside two of them, so that neither the mask nor the gradient of the token losses is uniform."""


class WrongType(AssertionError):
    """The values that the ranks hold are not of the declared type."""


def whole(kind: str, parts: Sequence[Tensor], copies: int = 1) -> Tensor:
    """The tensor of which the ranks of one axis hold ``parts``. ``copies``: neighbours that share a part, for `S(d) of ...`.

    Raises WrongType when the parts cannot be of this type, whatever the tensor."""
    outer, _, inner = kind.partition(" of ")
    if inner:
        return whole(outer, [whole(inner, parts[start : start + copies]) for start in range(0, len(parts), copies)])
    if kind == "R":
        if not all(torch.equal(part, parts[0]) for part in parts):
            raise WrongType("R, but the ranks hold different bits")
        return parts[0]
    if kind == "P":
        if len({part.shape for part in parts}) > 1:
            raise WrongType(f"P, but the shapes are {[tuple(part.shape) for part in parts]}")
        return torch.stack(list(parts)).sum(0)
    dim = 0 if kind == "Z" else int(kind.removeprefix("S(").removesuffix(")"))
    return _joined(_in_sequence_order(parts) if kind == "Z" else parts, dim)


def _in_sequence_order(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    size = len(parts)
    if any(part.dim() == 0 or part.shape[0] % 2 for part in parts):
        raise WrongType("Z, but a rank does not hold two equal chunks")
    chunks = {chunk: half for rank in range(size) for chunk, half in zip(zigzag_chunks(rank, size), parts[rank].chunk(2), strict=True)}
    return [chunks[chunk] for chunk in range(2 * size)]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1 or parts[0].dim() <= dim:
        raise WrongType(f"parts of dim {dim}, but the shapes are {[tuple(part.shape) for part in parts]}")
    return torch.cat(list(parts), dim)


def check(kinds: Mapping[str, str], ranks: Sequence[Tensor], expected: Tensor, *, tp: int, copies: int) -> None:
    """What the ranks hold (context-parallel outside, tensor-parallel inside) is the expected tensor, typed per axis.

    Raises WrongType otherwise."""
    lines = [ranks[start : start + tp] for start in range(0, len(ranks), tp)]
    parts = [whole(kinds["tp"], line, copies) if tp > 1 else line[0] for line in lines]
    found = whole(kinds["cp"], parts) if len(parts) > 1 else parts[0]
    if found.shape != expected.shape:
        raise WrongType(f"{dict(kinds)}: shape {tuple(found.shape)}, single process {tuple(expected.shape)}")
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= TOLERANCE:
        raise WrongType(f"{dict(kinds)}: {error:.1e} away from the single process")


@dataclass
class Probe:
    """One rank's values and gradients by point."""

    slices: Mapping[str, Sequence[HFSlice]]
    """Of every parameter."""
    values: Values = field(default_factory=dict)
    gradients: Values = field(default_factory=dict)

    def see(self, name: str, tensor: Tensor) -> None:
        """A point: a tensor, and the gradient of everything that is made of it."""
        self.values[name] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(partial(self._keep, name))  # type: ignore[no-untyped-call]

    def _keep(self, name: str, grad: Tensor) -> None:
        assert name not in self.gradients, name
        self.gradients[name] = grad.detach().clone()

    def see_residual(self, name: str, residual: Residual) -> None:
        """The stream, and what is to be added to it."""
        self.see(name, residual.stream)
        if residual.delta is not None:
            self.see(f"{name}, delta", residual.delta)

    def see_outputs(self, weight: str, tensor: Tensor) -> None:
        """Outputs of a column-parallel weight, apart as HuggingFace has them and without padding."""
        for part in self.slices[weight]:
            name = part.name.replace(".weight", " out")
            self.values[name] = tensor.detach()[..., part.row : part.row + part.rows].clone()
            tensor.register_hook(partial(self._keep_columns, name, part))  # type: ignore[no-untyped-call]

    def _keep_columns(self, name: str, part: HFSlice, grad: Tensor) -> None:
        self._keep(name, grad[..., part.row : part.row + part.rows])

    def see_weight(self, name: str, parameter: nn.Parameter, handle: Handle) -> None:
        """A parameter and what the layers delivered for it, apart as HuggingFace has them and without padding."""
        for part in self.slices[name]:
            rows = slice(part.row, part.row + part.rows)
            self.values[part.name], self.gradients[part.name] = (parameter.detach()[rows].clone(), handle.grad[rows].clone())

    def attach(self, stage: Stage) -> None:
        """Look at the inputs and outputs of every layer from now on."""
        for name, module in stage.named_modules():
            if isinstance(module, (Block, AddRMSNorm, ColumnLinear, RowLinear)):
                module.register_forward_pre_hook(partial(self._input, name))
            if isinstance(module, (AddRMSNorm, RowLinear, VocabParallelEmbedding, Block, ColumnLinear)):
                module.register_forward_hook(partial(self._output, name))
            if isinstance(module, Attention) and not module.is_fused:
                module.project = partial(self._project, name, module.project)  # type: ignore[method-assign]

    def _project(self, name: str, project: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Two weights in one product: its input, and the outputs of each."""
        x = x.view_as(x)
        self.see(f"{name}.qkv_proj in", x)
        weights = [f"{name}.{part}.weight" for part in ("q_proj", "kv_proj")]
        parts = project(x).split([sum(part.rows for part in self.slices[weight]) for weight in weights], -1)  # type: ignore[no-untyped-call]
        for weight, part in zip(weights, parts, strict=True):
            self.see_outputs(weight, part)
        return torch.cat(parts, -1)

    def _input(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # An alias of its own: its gradient is the one through this layer alone.
        if isinstance(inputs[0], Residual):
            residual = Residual(*(part if part is None else part.view_as(part) for part in inputs[0]))
            self.see_residual(f"{name} in", residual)
            return residual, *inputs[1:]
        x = inputs[0].view_as(inputs[0])
        self.see(f"{name} in", x)
        return x, *inputs[1:]

    def _output(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, ColumnLinear):
            self.see_outputs(f"{name}.weight", output)
        elif isinstance(module, Block):
            self.see_residual(f"{name} out", output)
        else:
            self.see(f"{name} out", output[1] if isinstance(module, AddRMSNorm) else output)
        if isinstance(module, RowLinear):
            self.values[f"{name} terms"] = F.linear(inputs[0], module.weight).detach()


def observe(place: Place, layout: Layout) -> tuple[Values, Values]:
    """Values and gradients of one pass at all points of one rank."""
    run = trainer(place, layout)
    list(whole_parameters(run))
    stage, mesh, config = run.stages[0], run.mesh, layout.config()
    stage.on_weight_access = lambda unit, backward: None  # every weight has been gathered, and no plan is followed
    specs = [spec for unit in rank_units(config, tp_rank=mesh.tp.rank)[0] for spec in unit.params]
    probe = Probe({spec.name: spec.slices for spec in specs})
    parameters = dict(stage.named_parameters())
    handles = {name: Handle(parameter) for name, parameter in parameters.items()}
    probe.attach(stage)

    data = batch(SAMPLES, documents=True)
    positions = stage.positions(data.tokens.shape[0], mesh.device, data.position_ids, data.document_ids)
    probe.see("rotary cos", positions.cos)
    tokens, labels, weights = (local_sequence(part, mesh.cp) for part in (data.tokens, data.labels, cast(Tensor, data.loss_mask)))
    logits = stage(tokens, positions)
    probe.see_outputs("lm_head.weight", logits)
    losses = token_losses(logits, labels, mesh.tp, config.model.vocab_size)
    probe.see("token loss", losses)
    # The loss of the whole batch is divided by all its tokens, so that those of the ranks are terms.
    loss = (losses * weights).sum() / cast(Tensor, data.loss_mask).sum()
    probe.see("loss", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in parameters.items():
        probe.see_weight(name, parameter, handles[name])
    return probe.values, probe.gradients
