"""Muon in every layout makes what torch.optim.Muon makes of whole HuggingFace matrices, and sends what its plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.native import load, save
from megatron_llama.config.schema import Config
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.rules.muon import Muon
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.run_params import param_groups
from torch import Tensor

from tests.harness import Cluster, WorkerError
from tests.parallel.cases import OPTIMIZER, STRATEGIES, Layout, trainer

STEPS = 3


@dataclass(frozen=True)
class MuonLayout(Layout):
    """A layout whose optimizer is Muon."""

    nesterov: bool = True
    adjust: str = "match_rms_adamw"

    @property
    def reference(self) -> MuonLayout:
        return MuonLayout(**vars(super().reference), nesterov=self.nesterov, adjust=self.adjust)

    def config(self) -> Config:
        config = super().config()
        optimizer = replace(config.optimizer, optimizer="muon", muon_nesterov=self.nesterov, muon_adjust_lr=self.adjust)
        return replace(config, optimizer=optimizer)


def after(place: Place, layout: MuonLayout) -> tuple[list[tuple[Rectangle, Tensor]], tuple[int, int], tuple[int, int]]:
    """What a rank owns after some steps, and what the last one has sent along dp and tp beside what is planned."""
    run = trainer(place, layout)
    recorder = run.mesh.recorder
    for index in range(STEPS):
        run.optimizer.settle()
        recorder.traffic.clear()
        run.step(index)
    run.optimizer.settle()
    [rule] = [rule for rule in run.optimizer.rules.distinct if isinstance(rule, Muon)]
    sent = tuple(
        sum(traffic.bytes for (axis, operation), traffic in recorder.traffic.items() if axis == name and operation.startswith("matrices"))
        for name in (run.mesh.dp_shard.name, "tp")
    )
    pieces = [(p.rectangle, p.tensors["master"].clone()) for p in shard_pieces(run.optimizer)]
    run.optimizer.close()
    return pieces, sent, rule.plan.sent(run.mesh.dp_shard.rank, run.mesh.tp.rank)


def gradients(place: Place, layout: Layout) -> list[dict[str, Tensor]]:
    """The whole gradient of every step of a run in one process, by HuggingFace's names."""
    run = trainer(place, layout)
    found = []
    for index in range(STEPS):
        run.runtime.step(run.batches(index))
        run.optimizer.gradients.finish_all()
        whole: dict[str, Tensor] = {}
        for bucket, shard in run.optimizer.gradients.shards.items():
            for rectangle, where in run.optimizer.bucket_plan.rectangles(bucket, 0):
                tensor = whole.setdefault(rectangle.name, torch.zeros(rectangle.shape, dtype=shard.dtype))
                tensor[place_of(rectangle)] = shard[where].view(rectangle.size)
        found.append(whole)
        run.optimizer.step([group.lr for group in param_groups(layout.config()).configs], clip=layout.clip)
    run.optimizer.settle()
    run.optimizer.close()
    return found


def place_of(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(rectangle.offset, rectangle.size, strict=True))


def torchs(layout: MuonLayout, found: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """What torch.optim.Muon and torch.optim.AdamW make of these gradients, clipped."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for name, gradient in found[0].items():
        weight = torch.empty_like(gradient)
        shape = tuple(gradient.shape)
        layout.weights()(Rectangle(name, shape, (0,) * len(shape), shape, 0), weight)
        parameters[name] = torch.nn.Parameter(weight)
    matrices = {n: p for n, p in parameters.items() if p.dim() == 2 and ".layers." in n}
    assert len(matrices) == 7 * layout.layers
    o = OPTIMIZER
    muon = torch.optim.Muon(
        list(matrices.values()), lr=o.lr, weight_decay=o.weight_decay, nesterov=layout.nesterov, adjust_lr_fn=layout.adjust
    )
    groups = [
        {
            "params": [p for n, p in parameters.items() if n not in matrices and (p.dim() > 1) is decay],
            "weight_decay": o.weight_decay * decay,
        }
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    for step in found:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        if layout.clip:
            # As clip_grad_norm_, with its factor in fp32: in fp64 some element of thousands would be rounded to another bf16.
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
            scale = ((norm + 1e-6) / layout.clip).clamp(min=1.0).to(torch.float32)
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad.div_(scale)
        muon.step()
        adamw.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


LAYOUTS = [
    MuonLayout(fp64=True, nesterov=False, adjust="original", clip=0.0, early=True),
    MuonLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", fp64=True, microbatches=2),
    MuonLayout(cp=2, dp=2, shard_size=2, strategy="optim_grads", fp64=True, bucket=10**9),
    *(
        pytest.param(layout, marks=pytest.mark.long)
        for layout in (
            *(MuonLayout(dp=2, strategy=strategy, fp64=True) for strategy in STRATEGIES),
            MuonLayout(tp=4, kv_heads=2, fp64=True),
            MuonLayout(pp=2, dp=2, fp64=True, microbatches=2, tied=True),
        )
    ),
]


@pytest.mark.tries("optimizer", "muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_adjust_lr")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_makes_what_torch_makes(cluster: Cluster, layout: MuonLayout) -> None:
    """In fp64, where no rounding to bf16 goes another way because sums have another order."""
    expected = torchs(layout, cluster.run(1, gradients, layout.reference)[0])
    seen = set[str]()
    for pieces, sent, planned in cluster.run(layout.world_size, after, layout):
        assert sent == planned
        for rectangle, master in pieces:
            seen.add(rectangle.name)
            torch.testing.assert_close(master, expected[rectangle.name][place_of(rectangle)], rtol=0, atol=1e-6)
    assert seen == expected.keys()


def resumed(place: Place, saved: MuonLayout | None, layout: MuonLayout, folder: str) -> list[tuple[Rectangle, Tensor]]:
    """Save one step of a layout, or load it and take another step."""
    run = trainer(place, layout)
    state = TrainState(1, 8)
    if saved is None:
        run.step(0)
        save(folder, run.optimizer, run.mesh, state, layout.sized())
    else:
        load(folder, run.optimizer, run.mesh, layout.config().model)
    run.step(1)
    run.optimizer.settle()
    pieces = [(p.rectangle, p.tensors["master"].clone()) for p in shard_pieces(run.optimizer) if p.primary]
    run.optimizer.close()
    return pieces


def whole(records: Sequence[list[tuple[Rectangle, Tensor]]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rectangle, master in (one for record in records for one in record):
        found.setdefault(rectangle.name, torch.full(rectangle.shape, torch.nan, dtype=master.dtype))[place_of(rectangle)] = master
    return found


def test_a_checkpoint_goes_on_in_another_layout(cluster: Cluster, tmp_path: Path) -> None:
    first, second = MuonLayout(dp=2, fp64=True), MuonLayout(tp=2, fp64=True, strategy="optim_grads_params")
    expected = whole(cluster.run(2, resumed, None, first, str(tmp_path)))
    found = whole(cluster.run(2, resumed, first, second, str(tmp_path)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)
    with pytest.raises(WorkerError, match="has the state of another optimizer"):
        cluster.run(1, resumed, first, Layout(fp64=True), str(tmp_path))
