"""Muon in every layout makes what torch.optim.Muon makes of whole HuggingFace matrices, and sends what its plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.native import load, save
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.rules.muon import COEFFICIENTS, Muon, orthogonalise
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.run_params import param_groups
from torch import Tensor

from tests.harness import Cluster, WorkerError
from tests.model.families.twins import FamilyLayout
from tests.parallel.cases import OPTIMIZER, Layout, trainer
from tests.torch_twin import drawn, follow

STEPS = 3
Pieces = list[tuple[Rectangle, Tensor]]


@dataclass(frozen=True)
class MuonLayout(Layout):
    """A layout whose optimizer is Muon."""

    nesterov: bool = True
    adjust: str = "match_rms_adamw"
    experts: int = 0
    """In all blocks but the second."""

    @property
    def reference(self) -> MuonLayout:
        return MuonLayout(**vars(super().reference), nesterov=self.nesterov, adjust=self.adjust, experts=self.experts)

    @property
    def matrices(self) -> int:
        """Those of all blocks: of attention, of an MLP, or of a router and each expert."""
        return 7 * self.layers if not self.experts else 7 * self.layers + (self.layers - 1) * (1 + 3 * self.experts - 3)

    def config(self) -> Config:
        config = super().config()
        if self.experts:
            sparse = {"num_experts": self.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": (1,)}
            config = replace(config, model=replace(config.model, **sparse))
        optimizer = replace(config.optimizer, optimizer="muon", muon_nesterov=self.nesterov, muon_adjust_lr=self.adjust)
        return replace(config, optimizer=optimizer)


@contextmanager
def iterating_in_bf16() -> Iterator[None]:
    """As torch.optim.Muon does, on any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "multiplies_bf16", lambda: True)
        yield


@iterating_in_bf16()
def after(place: Place, layout: MuonLayout) -> tuple[Pieces, tuple[int, int], tuple[int, int]]:
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
    planned = rule.plan.sent(run.mesh.dp_shard.rank, run.mesh.tp.rank)
    if (experts := run.mesh.experts) is not None:
        along = sum(
            traffic.bytes for (axis, operation), traffic in recorder.traffic.items() if axis == experts.shard.name and operation.startswith("matrices")
        )
        more = rule.plan.sent(experts.shard.rank, run.mesh.tp.rank, layout.ep)
        sent = (sent[0] + along, sent[1])
        planned = (planned[0] + more[0], planned[1] + more[1])
    pieces = [(p.rectangle, p.tensors["master"].clone()) for p in shard_pieces(run.optimizer)]
    run.optimizer.close()
    return pieces, sent, planned


@iterating_in_bf16()
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


def plain(name: str, dims: int) -> tuple[float, float]:
    """Learning rate and decay of a parameter that is in no group."""
    return OPTIMIZER.lr, OPTIMIZER.weight_decay if dims > 1 else 0.0


def torchs(
    layout: MuonLayout | Layout, found: Sequence[Mapping[str, Tensor]], options: Callable[[str, int], tuple[float, float]] = plain, **muon: Any
) -> Mapping[str, Tensor]:
    """What torch's AdamW, and for matrices of layers its Muon with the options ``muon`` if there are any, make of these gradients, clipped."""
    parameters = {name: torch.nn.Parameter(drawn(layout.weights(), name, tuple(g.shape), g.dtype)) for name, g in found[0].items()}
    groups: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    for name, parameter in parameters.items():
        lr, decay = options(name, parameter.dim())
        groups[bool(muon) and parameter.dim() == 2 and ".layers." in name].append({"params": [parameter], "lr": lr, "weight_decay": decay})
    o = OPTIMIZER
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups[False], betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)]
    if muon:
        assert len(groups[True]) == (layout.matrices if isinstance(layout, MuonLayout) else 7 * layout.layers)
        optimizers.append(torch.optim.Muon(groups[True], **muon))
    follow(parameters, optimizers, found, layout.clip)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def assert_owned_by_torch(records: Sequence[Pieces], expected: Mapping[str, Tensor], atol: float) -> None:
    """Every piece of every rank is that of torch's tensors, of which none is missing."""
    seen = set[str]()
    for rectangle, master in (piece for record in records for piece in record):
        seen.add(rectangle.name)
        torch.testing.assert_close(master, expected[rectangle.name][place_of(rectangle)], rtol=0, atol=atol)
    assert seen == expected.keys()


LAYOUTS = [
    MuonLayout(fp64=True, nesterov=False, adjust="original", clip=0.0, early=True),
    MuonLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", fp64=True, microbatches=2),
    MuonLayout(cp=2, dp=2, shard_size=2, strategy="optim_grads", fp64=True, bucket=10**9),
    MuonLayout(tp=4, kv_heads=2, fp64=True),
    MuonLayout(pp=2, dp=2, strategy="no_shard", fp64=True, microbatches=2, tied=True),
    MuonLayout(experts=4, fp64=True),
    MuonLayout(experts=4, tp=2, sp=True, dp=2, strategy="optim_grads_params", slots="2", fp64=True),
    MuonLayout(experts=4, dp=4, ep=2, strategy="optim_grads", microbatches=2, fp64=True),
    MuonLayout(experts=4, tp=2, sp=True, dp=2, ep=2, strategy="optim", fp64=True),
    MuonLayout(experts=4, dp=8, ep=2, shard_size=4, strategy="optim_grads_params", fp64=True),
    MuonLayout(experts=4, pp=2, dp=2, ep=2, strategy="no_shard", fp64=True, microbatches=2),
]


@pytest.mark.long
@pytest.mark.tries("optimizer", "muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_adjust_lr")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_makes_what_torch_makes(cluster: Cluster, layout: MuonLayout) -> None:
    """In fp64, where no rounding to bf16 goes another way because sums have another order."""
    how = {"nesterov": layout.nesterov, "adjust_lr_fn": layout.adjust}
    expected = torchs(layout, cluster.run(1, gradients, layout.reference)[0], **how)
    records = cluster.run(layout.world_size, after, layout)
    assert all(sent == planned for _, sent, planned in records)
    assert_owned_by_torch([pieces for pieces, *_ in records], expected, atol=1e-6)


@pytest.mark.parametrize("elements", [2**20, 100], ids=["at once", "in parts"])
@pytest.mark.parametrize("shape", [(48, 48), (96, 40), (40, 96)], ids=str)
def test_without_instructions_for_bf16(shape: tuple[int, int], elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are computed in fp32, nearer to the same iteration in fp64 than bf16 comes, and as torch does, in place."""
    monkeypatch.setattr("megatron_llama.engine.rules.muon.WIDE_ELEMENTS", elements)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = matrix.double()
    exact /= exact.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    errors = []
    for multiplies in (False, True):
        monkeypatch.setattr(devices, "multiplies_bf16", lambda multiplies=multiplies: multiplies)
        result = orthogonalise(matrix.clone(), 5)
        assert result.dtype is torch.bfloat16 and result.shape == shape
        errors.append(float((result - exact).norm() / exact.norm()))
    assert errors[0] < 0.9 * errors[1] < 0.03, errors


def resumed(place: Place, saved: Layout | None, layout: Layout, folder: str) -> Pieces:
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


def whole(records: Sequence[Pieces]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rectangle, master in (one for record in records for one in record):
        found.setdefault(rectangle.name, torch.full(rectangle.shape, torch.nan, dtype=master.dtype))[place_of(rectangle)] = master
    return found


class Mixture(FamilyLayout):
    """A family's model, trained by Muon."""

    def config(self) -> Config:
        config = super().config()
        return replace(config, optimizer=replace(config.optimizer, optimizer="muon"))


DENSE = MuonLayout(dp=2, fp64=True), MuonLayout(tp=2, fp64=True, strategy="optim_grads_params")
SPARSE = (
    Mixture(family="qwen3_moe", dp=2, ep=2, fp64=True),
    Mixture(family="qwen3_moe", tp=2, sp=True, fp64=True, strategy="optim_grads_params"),
)


@pytest.mark.parametrize(("first", "second"), [DENSE, pytest.param(*SPARSE, marks=pytest.mark.long)], ids=["dense", "experts"])
def test_a_checkpoint_goes_on_in_another_layout(cluster: Cluster, tmp_path: Path, first: Layout, second: Layout) -> None:
    expected = whole(cluster.run(2, resumed, None, first, str(tmp_path)))
    found = whole(cluster.run(2, resumed, first, second, str(tmp_path)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)
    if first is DENSE[0]:
        with pytest.raises(WorkerError, match="has the state of another optimizer"):
            cluster.run(1, resumed, first, Layout(fp64=True), str(tmp_path))
