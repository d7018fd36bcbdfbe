"""A pipeline stage is the model with fewer layers: what it announces, what it masks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.plan.chunks import GRANULARITIES, Granularity
from megatron_llama.model.plan.params import Partition, stage_units, whole_model
from megatron_llama.model.plan.run_params import trained_units
from megatron_llama.pipeline.plan.stage_accesses import unit_weight_accesses, weight_accesses_of
from megatron_llama.schedule import Action, Op
from torch import Tensor

from tests.model.nn.handle import Handle
from tests.model.test_params import even, paper_mesh, paper_stage, specs_of
from tests.parallel.cases import MODEL, Layout, token_ids

CPU = torch.device("cpu")


def loaded(partition: Partition, index: int, recompute: Granularity = "none") -> Stage:
    stage = paper_stage(MODEL, partition, index, recompute=recompute)
    load_stages([stage], specs_of(stage_units(MODEL, partition, index)), InitialWeights(5, 0.1), dtype=torch.float32, device=CPU)
    return stage


def whole() -> Stage:
    return loaded(whole_model(MODEL), 0)


class Watched:
    """A stage whose uses and reads of weights are written down: ``F1`` and ``B1`` announce unit 1, ``r1`` reads one of its weights."""

    def __init__(self, stages: int, index: int, recompute: Granularity = "none", freeze: tuple[str, ...] = ()) -> None:
        self.events = list[str]()
        partition = even(MODEL.num_hidden_layers, stages)
        self.stage = loaded(partition, index, recompute)
        self.stage.on_weight_access = lambda unit, backward: self.events.append(f"{'B' if backward else 'F'}{unit}")
        self.handles = [
            self.lived_in(unit, spec)
            for unit, specs in enumerate(trained_units(stage_units(MODEL, partition, index), freeze=freeze))
            for spec in specs.params
        ]
        self.x = token_ids(12).view(6, 2) if index == 0 else torch.ones(6, 2, MODEL.hidden_size, requires_grad=True)

    def lived_in(self, unit: int, spec: ParamSpec) -> Handle:
        weight = self.stage.get_parameter(spec.name).requires_grad_(spec.trainable)
        return Handle(weight, log=partial(self.events.append, f"r{unit}"))

    def forward(self) -> Tensor:
        return self.stage(self.x, self.stage.positions(6, CPU))

    def seen(self) -> tuple[list[str], list[str]]:
        """The uses; and what was read while the use was the newest, without repetition."""
        accesses = [event for event in self.events if event[0] != "r"]
        order = [event for event, before in zip(self.events, ["", *self.events], strict=False) if event != before]
        self.events.clear()
        return accesses, order


@pytest.mark.parametrize("recompute", GRANULARITIES)
@pytest.mark.parametrize(("stages", "index"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_every_unit_is_announced_before_any_of_its_weights_is_read(stages: int, index: int, recompute: Granularity) -> None:
    watched = Watched(stages, index, recompute)
    units = range(len(stage_units(MODEL, even(MODEL.num_hidden_layers, stages), index)))
    output = watched.forward()
    accesses, order = watched.seen()
    assert accesses == [f"F{unit}" for unit in units]
    assert order == [event for unit in units for event in (f"F{unit}", f"r{unit}")]
    output.sum().backward()
    accesses, order = watched.seen()
    read = units[1:] if index == 0 else units
    assert accesses == [f"B{unit}" for unit in reversed(read)]
    assert order == [event for unit in reversed(read) for event in (f"B{unit}", f"r{unit}")]


@pytest.mark.parametrize("recompute", GRANULARITIES)
def test_a_split_pass_announces_what_a_whole_one_does(recompute: Granularity) -> None:
    whole_pass, split = Watched(1, 0, recompute), Watched(1, 0, recompute)
    for handle in split.handles:
        handle.put_off = True
    for watched in (whole_pass, split):
        watched.forward().sum().backward()
    assert split.seen()[0] == whole_pass.seen()[0]
    with torch.no_grad():
        for handle in split.handles:
            for work in handle.work:
                work()
    accesses, reads = split.seen()
    # Norms of blocks that recompute them for the input of a matrix: they are resident, so it is no use.
    assert accesses == [] and (reads == []) is (recompute != "selective")
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(split.handles, whole_pass.handles, strict=True))


def test_a_tied_head_is_the_embedding_when_both_ends_are_here() -> None:
    config = Layout(pp=2, virtual=2, schedule="zb-v", tied=True).config()
    mesh = paper_mesh(1, 0, 2, 0)
    stages = build_stages(config, mesh)
    assert list(stages) == [0, 3] and not stages[3].is_first and stages[3].is_last
    load_stages(stages.values(), rank_specs(config, mesh), InitialWeights(5, 0.1), dtype=torch.float32, device=CPU)
    assert stages[3].head_weight is stages[0].get_parameter("model.embed_tokens.weight")
    assert [name for name, _ in stages[3].named_parameters() if "embed" in name or "lm_head" in name] == []
    assert list(build_stages(config, paper_mesh(1, 0, 2, 1))) == [1, 2]
    apart = build_stages(Layout(pp=2, tied=True).config(), paper_mesh(1, 0, 2, 1))
    assert apart[1].head_weight is apart[1].get_parameter("lm_head.weight")


@pytest.mark.parametrize("recompute", GRANULARITIES)
def test_without_backward_forward_passes_alone_are_announced(recompute: Granularity) -> None:
    """In evaluation, and in a first stage that is frozen."""
    for index, freeze in ((0, ()), (1, ()), (0, ("model.*",))):
        watched = Watched(2, index, recompute, freeze)
        with torch.set_grad_enabled(bool(freeze)):
            assert not watched.forward().requires_grad
        assert watched.seen()[0] == ["F0", "F1", "F2"]


@pytest.mark.parametrize("recompute", GRANULARITIES)
@pytest.mark.parametrize(
    ("freeze", "backward"),
    [
        (("model.embed_tokens.*",), "B5 B4 B3 B2 B1"),
        (("model.embed_tokens.*", "model.layers.0.*"), "B5 B4 B3 B2"),
        (("model.embed_tokens.*", "model.layers.[01].*", "model.layers.2.*attn*"), "B5 B4 B3"),
        (("model.layers.0.*", "model.layers.2.*"), "B5 B4 B3 B2 B1"),
        (("lm_head.*", "model.norm.*", "model.layers.3.*"), "B5 B4 B3 B2 B1"),
        (("model.*",), "B5"),
    ],
)
def test_backward_goes_down_to_the_first_unit_that_is_trained(freeze: tuple[str, ...], backward: str, recompute: Granularity) -> None:
    """As the plan has it, which the engine gathers by. No frozen weight's gradient is written or postponed."""
    watched = Watched(1, 0, recompute, freeze)
    units, partition = trained_units(stage_units(MODEL, whole_model(MODEL), 0), freeze=freeze), whole_model(MODEL)
    planned = weight_accesses_of([Action(Op.BACKWARD, 0, 0)], *unit_weight_accesses([units], partition))
    for put_off in (False, True):
        for handle in watched.handles:
            handle.put_off = put_off
        output = watched.forward()
        watched.seen()
        output.sum().backward()
        assert " ".join(watched.seen()[0]) == backward == " ".join(map(str, planned))
    specs = [spec for unit in units for spec in unit.params]
    for handle, spec in zip(watched.handles, specs, strict=True):
        assert bool(handle.written) is spec.trainable, spec.name
        assert len(handle.work) == (spec.trainable and spec.decay), spec.name


def test_a_document_is_what_it_is_alone() -> None:
    """Outputs and the sums of gradients, of two samples of documents."""
    stage, ids = whole().requires_grad_(), token_ids(32).view(16, 2)
    spans = [(0, 0, 5), (0, 5, 10), (0, 10, 15), (0, 15, 16), (1, 0, 16)]
    numbers, places = torch.empty(16, 2, dtype=torch.int32), torch.empty(16, 2, dtype=torch.int64)
    for number, (sample, start, stop) in enumerate(spans):
        numbers[start:stop, sample] = number
        places[start:stop, sample] = torch.arange(stop - start)
    logits = stage(ids, stage.positions(16, CPU, places, numbers))
    alone = [stage(ids[start:stop, sample : sample + 1], stage.positions(stop - start, CPU)) for sample, start, stop in spans]
    expected = torch.cat([torch.cat(alone[:4]), alone[4]], dim=1)
    weights = list(stage.parameters())
    grads, others = (torch.autograd.grad(out.square().sum(), weights) for out in (logits, expected))
    for found, one in zip((logits, *grads), (expected, *others), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5 * one.abs().max().item())
