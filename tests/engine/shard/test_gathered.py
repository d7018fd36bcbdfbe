"""A part of a model that is whole between steps, on every rank or on the first alone, and the rest that says it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.engine.shard.models import net, sharded, train
from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SINGLE = Place(0, 1, 0)
Only = Callable[[Any], Any]
"""What ``only`` is for a model."""


def whole_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not isinstance(parameter, Placeholder)}


def values(engine: ModuleEngine) -> dict[str, Tensor]:
    """Copies of everything."""
    with engine.gathered():
        return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (lambda model: "head.weight", {"head.weight"}),
        (lambda model: "blocks.*.mix", {f"blocks.{number}.mix" for number in range(4)}),
        (lambda model: model.blocks[2].feed, {"blocks.2.feed.up.weight", "blocks.2.feed.up.bias", "blocks.2.feed.down.weight"}),
        (lambda model: ["scale", model.embed], {"scale", "embed.weight"}),
        (lambda model: (name for name in ("scale", "head.weight")), {"scale", "head.weight"}),
    ],
)
def test_only_what_is_asked_for_is_whole(only: Only, expected: set[str]) -> None:
    with sharded(net()) as engine:
        model = engine.model
        before = values(engine)
        with engine.gathered(only=only(model)):
            assert whole_names(model) == expected
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in expected)
            for name, parameter in model.named_parameters():
                if name not in expected:
                    with pytest.raises(ShardedParameterError, match=rf"{name}: got norm while it is not among .*only=.*add it to only="):
                        parameter.norm()
        assert whole_names(model) == set()
        assert equal(values(engine), before)


def test_a_tied_weight_is_chosen_by_either_name() -> None:
    with sharded(net("tied")) as engine:
        for name in ("head.weight", "embed.weight"):
            with engine.gathered(only=name, modify=True):
                assert engine.model.head.weight is engine.model.embed.weight
                engine.model.head.weight.fill_(7.0 if name == "head.weight" else 8.0)
            assert values(engine)["embed.weight"].unique().tolist() == ([7.0] if name == "head.weight" else [8.0])


def test_a_chosen_module_can_be_called_and_copied() -> None:
    x = torch.randn(3, 5, 12)
    for modify in (False, True):
        with sharded(net().float(), dtype=torch.bfloat16) as engine:
            block = engine.model.blocks[1]
            given = x if modify else x.bfloat16()
            with engine.gathered(only=block, modify=modify):
                plain = copy.deepcopy(block)
                assert torch.equal(block(given), plain(given)) and type(plain).__module__ == type(block).__module__
                with pytest.raises(ShardedParameterError, match="got a copy while it is not among"):
                    copy.deepcopy(engine.model)
                with pytest.raises(ShardedParameterError, match="got detach while it is not among"):
                    engine.model.state_dict()


def test_inference_mode_is_no_obstacle() -> None:
    with sharded(net()) as engine:
        before = values(engine)
        with torch.inference_mode():
            with engine.gathered(only="head.*"):
                assert torch.equal(engine.model.head.weight, before["head.weight"])
            with engine.gathered(only="head.*", modify=True):
                engine.model.head.weight.fill_(3.0)
            with pytest.raises(TrainingError, match="got a change of scale"), engine.gathered(only="scale"):
                engine.model.scale.add_(1)
        train(SINGLE, engine, microbatches=1, steps=1)
        assert (values(engine)["head.weight"] - 3.0).abs().max() < 0.1 < (before["head.weight"] - 3.0).abs().min()


def on_rank_0(place: Place, strategy: str) -> list[str]:
    """What a rank finds, and what it is told."""
    engine = sharded(net(), strategy=strategy)
    train(place, engine, microbatches=1, steps=1)
    expected = values(engine)
    said = []
    for only in (None, "head.*"):
        with engine.gathered(only=only, rank0=True, to="cpu"):
            if place.rank == 0:
                assert torch.equal(engine.model.head.weight, expected["head.weight"])
                if only is None:
                    assert equal(dict(engine.model.state_dict()), expected)
            try:
                said.append(f"{float(engine.model.head.weight.norm()):.6f}")
            except ShardedParameterError as error:
                said.append(str(error))
    after = values(engine)
    engine.close()
    assert equal(after, expected)
    return said


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_ranks_than_0_hold_placeholders_that_say_so(cluster: Cluster, strategy: str) -> None:
    first, second = cluster.run(2, on_rank_0, strategy)
    assert float(first[0]) == float(first[1]) > 0
    assert all("head.weight: got norm while it is whole on rank 0 only, expected" in said and "rank0=True" in said for said in second)


class Counter(nn.Module):
    """A buffer beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def changed(place: Place, strategy: str, rank0: bool, only: Sequence[str], shard_size: int) -> tuple[bool, list[str]]:
    """Whether all is as it should be after a change of what is chosen; and the buffers that are rank 0's."""
    torch.manual_seed(0)
    model = nn.Sequential(Counter(), Counter())
    engine = ml.shard(model, units=[Counter], strategy=strategy, dtype=torch.bfloat16, shard_size=shard_size)
    before = {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in model.state_dict().items()}
    with engine.gathered(modify=True, only=only, rank0=rank0, to="cpu"):
        if place.rank == 0:
            model[1].linear.weight.data.fill_(1 + 2**-12)  # not a number of bf16
        for module in model:
            module.count.fill_(place.rank + 1.0)
    state = model.state_dict()
    after = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    expected = {name: value for name, value in before.items() if "count" not in name}
    expected["1.linear.weight"] = torch.full((4, 4), 1 + 2**-12)
    buffers = [name for name, value in after.items() if "count" in name and bool((value == 1).all())]
    with engine.gathered():  # what computes
        rounded = model[1].linear.weight.float().unique().tolist()
    engine.close()
    return equal({name: value for name, value in after.items() if "count" not in name}, expected) and rounded == [1.0], buffers


@pytest.mark.few(2)
@pytest.mark.parametrize("rank0", [True, False])
@pytest.mark.parametrize(("strategy", "world", "shard_size"), [*((one, 2, 0) for one in STRATEGIES), ("optim_grads_params", 4, 2)])
def test_what_rank_0_changes_is_kept_and_the_rest_stays(
    cluster: Cluster, strategy: str, world: int, shard_size: int, rank0: bool
) -> None:
    for rank, found in enumerate(cluster.run(world, changed, strategy, rank0, ["1.linear.weight", "1.count"], shard_size)):
        assert found == (True, ["0.count", "1.count"] if rank == 0 else ["1.count"])


def refused(place: Place) -> list[str]:
    engine = sharded(net())
    said = []
    for arguments in (
        {"only": ["head.weight", "haed.*", nn.Linear(2, 2)]},
        {"only": "head.weight" if place.rank else "embed.weight"},
        {"rank0": place.rank == 0},
        {"to": "meta"},
    ):
        with pytest.raises(ConfigError) as error, engine.gathered(**arguments):  # type: ignore[arg-type]
            pass
        said.append(str(error.value))
    with pytest.raises(TypeError, match="got Placeholder, expected names"), engine.gathered(only=[engine.model.head.weight]):  # type: ignore[list-item]
        pass
    with pytest.raises(TrainingError) as changed_error, engine.gathered(only="scale"):
        engine.model.scale.data.add_(1)
    said.append(str(changed_error.value))
    assert whole_names(engine.model) == set()
    train(place, engine, microbatches=1, steps=1)  # the engine goes on
    engine.close()
    return said


def test_arguments_that_fit_nothing_or_differ_are_errors_of_all(cluster: Cluster) -> None:
    first, second = cluster.run(2, refused)
    assert first == second
    unmatched, other, one_rank, meta, change = first
    assert "got 'haed.*', which is no parameter" in unmatched and "got Linear(...), which is no" in unmatched and "model is scale" in unmatched
    assert "only: got head.weight on rank 1, expected embed.weight as on rank 0" in other
    assert "rank0: got False on rank 1" in one_rank
    assert 'engine.gathered(to=): got meta, expected a device with memory; give to="cpu"' in meta
    assert "got a change of scale, expected" in change


class Wide(nn.Module):
    """Matrices that are far larger than what the host sends beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 320, bias=False)
        self.down = nn.Linear(320, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


MATRIX = 96 * 320
BUCKET = 4 * 2 * MATRIX
"""Bytes of a block's masters."""


def allocated_in(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes of large tensors that there are at most while something is done, and that are left, beside those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    large = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if abs(event.nbytes()) >= MATRIX)
    totals = list(accumulate(large, initial=0))
    return max(totals), totals[-1]


def allocated(place: Place, only: str, options: dict[str, Any], arguments: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that a gather has at most before its block begins, in the block, and afterwards."""
    engine = ml.shard(nn.Sequential(*(Wide() for _ in range(4))), units=[Wide], **options)
    engine._engine.settle()
    section = engine.gathered(only=only, **arguments)
    peak, inside = allocated_in(section.__enter__)
    _, freed = allocated_in(lambda: section.__exit__(None, None, None))
    engine.close()
    return peak, inside, inside + freed


@pytest.mark.parametrize(
    ("only", "options", "arguments", "part"),
    [
        ("[12].*", {}, {}, 2 * BUCKET),
        ("*.up.weight", {}, {"to": "cpu"}, 2 * BUCKET),
        ("2.*", {}, {"modify": True}, BUCKET),
        ("[12].*", {"dtype": torch.bfloat16}, {}, BUCKET),
    ],
)
def test_in_memory_are_the_part_and_one_bucket(only: str, options: dict[str, Any], arguments: dict[str, Any], part: int) -> None:
    """To the byte in one process, where there is no gloo: its all-gather makes two copies of the bucket while it runs."""
    assert allocated(SINGLE, only, options, arguments) == (part + BUCKET, part, 0)


def test_other_ranks_have_memory_for_one_bucket(cluster: Cluster) -> None:
    """To the byte where nothing is sent."""
    options = {"strategy": "no_shard", "bucket_size": 2 * MATRIX}
    found = cluster.run(2, allocated, "[123].*", options, {"rank0": True})
    assert found == [(4 * BUCKET, 3 * BUCKET, 0), (BUCKET, 0, 0)]
