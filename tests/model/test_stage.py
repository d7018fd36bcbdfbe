"""A pipeline stage is the model with fewer layers: what it announces, what it masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from megatron_llama.engine.param_handle import attach_param_handle
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.plan.chunks import GRANULARITIES, Granularity
from megatron_llama.model.plan.params import Partition, stage_units, whole_model
from megatron_llama.model.plan.run_params import trained_units
from megatron_llama.pipeline.plan.stage_accesses import unit_weight_accesses, weight_accesses_of
from megatron_llama.schedule import Action, Op
from torch import Tensor, nn

from tests.model.test_params import even, paper_mesh, paper_stage, specs_of
from tests.parallel.cases import MODEL, Layout, token_ids
from tests.train.setup.test_peak import most_allocated

CPU = torch.device("cpu")


def loaded(partition: Partition, index: int, recompute: Granularity = "none") -> Stage:
    stage = paper_stage(MODEL, partition, index, recompute=recompute)
    load_stages([stage], specs_of(stage_units(MODEL, partition, index)), InitialWeights(5, 0.1), dtype=torch.float32, device=CPU)
    return stage


def whole() -> Stage:
    return loaded(whole_model(MODEL), 0)


class Asked:
    """A handle that writes down when its weight is asked for."""

    def __init__(self, weight: nn.Parameter, log: Callable[[], None]) -> None:
        self.log, self.grad, self.kept = log, torch.zeros_like(weight), list[Callable[[], None]]()
        self.put_off = False
        attach_param_handle(weight, self)

    def wait_unsharded(self) -> int:
        self.log()
        return 0

    def check_version(self, version: int) -> None:
        self.log()

    def grad_view(self) -> tuple[Tensor, float]:
        return self.grad, 1.0

    def grad_written(self) -> None:
        pass

    def keep_wgrad(self, work: Callable[[], None]) -> bool:
        self.kept += [work] * self.put_off
        return self.put_off


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

    def lived_in(self, unit: int, spec: ParamSpec) -> Asked:
        weight = self.stage.get_parameter(spec.name).requires_grad_(spec.trainable)
        return Asked(weight, partial(self.events.append, f"r{unit}"))

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
            for work in handle.kept:
                work()
    accesses, reads = split.seen()
    # Norms of blocks that recompute them for the input of a matrix: they are resident, so it is no use.
    assert accesses == [] and (reads == []) is (recompute != "selective")
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(split.handles, whole_pass.handles, strict=True))


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
        assert bool(handle.grad.any()) is spec.trainable, spec.name
        assert len(handle.kept) == (spec.trainable and spec.decay), spec.name


def test_stages_in_a_row_are_the_model() -> None:
    ids = token_ids(20).view(10, 2)
    alone = whole()
    expected = alone(ids, alone.positions(10, CPU))
    for partition in (even(4, 4), Partition((range(1), range(1, 2), range(2, 4)), (0, 1, 2))):
        x = ids
        for index in range(partition.stages):
            stage = loaded(partition, index)
            x = stage(x, stage.positions(10, CPU))
        assert torch.equal(x, expected)


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


def test_no_position_sees_the_future() -> None:
    stage, ids = whole(), token_ids(16).view(16, 1)
    changed = ids.clone()
    changed[9] = (changed[9] + 1) % MODEL.vocab_size
    before, after = (stage(x, stage.positions(16, CPU)) for x in (ids, changed))
    assert torch.equal(before[:9], after[:9])
    assert bool((before[9:] != after[9:]).any(-1).all())


def test_masked_documents_equal_documents_on_their_own() -> None:
    """Two documents packed into one sample, with positions that restart, against each of them alone."""
    stage, ids, first = whole(), token_ids(16).view(16, 1), 6
    places = torch.cat((torch.arange(first), torch.arange(16 - first))).unsqueeze(-1)
    numbers = (torch.arange(16) >= first).int()
    documents = numbers.unsqueeze(-1)
    packed = stage(ids, stage.positions(16, CPU, places, documents))
    alone = [stage(part, stage.positions(part.shape[0], CPU)) for part in (ids[:first], ids[first:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    # Rotary attention sees distances only: under the mask the restart changes nothing, without it it does.
    masked, restarted, plain = (
        stage(ids, stage.positions(16, CPU, *options)) for options in ((None, documents), (places, None), (None, None))
    )
    torch.testing.assert_close(masked, packed, rtol=1e-5, atol=1e-5)
    assert min(float((one - other).abs().max()) for one, other in ((packed, plain), (packed, restarted), (restarted, plain))) > 1e-2


def attention_peak(length: int) -> int:
    """Bytes that attention to packed documents takes at most, forward and backward, beside its input."""
    stage, document_ids = whole(), (torch.arange(length) // 700).int().unsqueeze(-1)
    layer = stage.model.layers["0"].self_attn
    x = torch.zeros(length, 1, MODEL.hidden_size, requires_grad=True)

    def run() -> None:
        positions = stage.positions(length, CPU, None, document_ids)
        layer(x, positions).sum().backward()

    run()
    x.grad = None
    return most_allocated(run)[0]


@pytest.mark.long
def test_long_samples_of_documents_need_no_square() -> None:
    """Up to 4096 tokens they are one mask of s * s bytes, and numbers four times as large; beyond, blocks of 256 queries."""
    assert attention_peak(4096) > 5 * 4096**2
    assert attention_peak(8192) < 8192**2 // 2, "half of a mask of truth values"


def test_documents_by_blocks_equal_those_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, of a sample that is taken for a long one."""
    stage, ids = whole().requires_grad_(), token_ids(32).view(16, 2)
    documents = torch.stack((torch.arange(16) // 5, torch.arange(16) // 16), dim=1).int()
    found = []
    for longest in (16, 15):
        monkeypatch.setattr("megatron_llama.model.positions.LONGEST_MASKED", longest)
        monkeypatch.setattr("megatron_llama.model.nn.sliding.BLOCK", 4)
        positions = stage.positions(16, CPU, None, documents)
        assert (positions.mask is None) is (longest == 15)
        logits = stage(ids, positions)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(stage.parameters()))])
    for by_blocks, by_mask in zip(*found, strict=True):
        torch.testing.assert_close(by_blocks, by_mask, rtol=1e-4, atol=1e-5 * by_mask.abs().max().item())
