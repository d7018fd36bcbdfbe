"""What goes wrong in training loops: every rank says what it was, by name, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.engine.shard.shapes import Block, Tower
from tests.engine.shard.training import Run, built
from tests.engine.shard.twins import own_loss
from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES, digest

PARAMS = "optim_grads_params"
PATIENCE = 150.0
"""Seconds after which a job hangs. A fault takes less than one, more where others use the machine."""
RUN = Run("plain")


class Steered(Tower):
    """Calls the blocks that it is told to call."""

    def __init__(self) -> None:
        super().__init__()
        self.order: Sequence[int] = (0, 1, 2, 3)
        self.sad = False

    def trunk(self, x: Tensor) -> Tensor:
        """See Tower."""
        for number in self.order:
            x = self.blocks[number](x)
            if self.sad and number == 1:
                raise ValueError("a bad sample")
        return x


Fault = Callable[[Steered, Any, int], object]
"""Called with a model, its engine, and the rank."""


def step(model: Steered, engine: Any, rank: int, *, backwards: int = 1, forward: Callable[[], Tensor] | None = None) -> Any:
    """One good step."""
    for _ in range(backwards):
        loss = forward() if forward else own_loss(model, RUN.parts(rank, 0)[0])
        loss.backward()  # type: ignore[no-untyped-call]
    return engine.step()


def message_of(place: Place, fault: Fault, good_steps: int, options: dict[str, Any]) -> str:
    """What a rank is told: type and text of the error that leaves the ``with`` of a training loop."""
    model = built(Steered, place.rank)
    assert isinstance(model, Steered)
    given = {"units": [Block], "strategy": PARAMS, "clip": 1.0, "optimizer": ml.AdamW(lr=1e-3)} | options
    try:
        with ml.shard(model, **given) as engine:
            for _ in range(good_steps):
                step(model, engine, place.rank, backwards=given.get("microbatches", 1))
            fault(model, engine, place.rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def messages(cluster: Cluster, fault: Fault, *, world: int = 2, good_steps: int = 2, **options: Any) -> list[str]:
    """Of all ranks. Fails if a rank hangs or dies."""
    return cluster.run(world, message_of, fault, good_steps, options, timeout=PATIENCE)


def take(order: Sequence[int], model: Steered, engine: Any, rank: int) -> None:
    model.order = order
    step(model, engine, rank)


def called_twice(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 1, 2, 3), model, engine, rank)


def out_of_order(model: Steered, engine: Any, rank: int) -> None:
    take((0, 2, 1, 3), model, engine, rank)


def never_called(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 3), model, engine, rank)


def last_never_called(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 2), model, engine, rank)


WAYS = {
    called_twice: ("blocks.1", "blocks.2"),
    out_of_order: ("blocks.2", "blocks.1"),
    never_called: ("blocks.3", "blocks.2"),
    last_never_called: ("outlet", "blocks.3"),
}
"""What is called, and what was expected."""


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", ["optim", PARAMS])
@pytest.mark.parametrize("fault", WAYS)
def test_another_way_than_in_the_first_step_is_an_error(fault: Fault, strategy: str, cluster: Cluster) -> None:
    """On all ranks alike: found, expected, and what to do."""
    for message in messages(cluster, fault, strategy=strategy):
        assert all(name in message for name in WAYS[fault]) and "static_order=False" in message, message


@pytest.mark.parametrize("fault", [never_called, last_never_called])
def test_a_unit_that_the_first_step_leaves_out_is_named(fault: Fault, cluster: Cluster) -> None:
    unit = "blocks.2" if fault is never_called else "blocks.3"
    for message in messages(cluster, fault, good_steps=0):
        assert f"{unit}.up.weight" in message and "find_unused=True" in message, message


def rank_1_skips(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 3) if rank == 1 else (0, 1, 2, 3), model, engine, rank)


def rank_1_skips_the_last(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 2) if rank == 1 else (0, 1, 2, 3), model, engine, rank)


def rank_1_repeats(model: Steered, engine: Any, rank: int) -> None:
    take((0, 1, 2, 2, 3) if rank == 1 else (0, 1, 2, 3), model, engine, rank)


RANKS = {rank_1_skips: "blocks.2", rank_1_skips_the_last: "blocks.3", rank_1_repeats: "blocks.2"}


@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("fault", RANKS)
def test_a_rank_that_takes_another_way_is_named_by_all(fault: Fault, good_steps: int, cluster: Cluster) -> None:
    for message in messages(cluster, fault, good_steps=good_steps):
        assert "rank 1" in message and RANKS[fault] in message, message


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_four_ranks_skips_a_unit(strategy: str, cluster: Cluster) -> None:
    for message in messages(cluster, rank_1_skips, world=4, strategy=strategy):
        assert "rank 1" in message and "blocks.2" in message, message


@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("unused", ["zero", "skip"])
def test_a_rank_skips_a_unit_where_no_order_is_static(unused: str, good_steps: int, cluster: Cluster) -> None:
    for message in messages(cluster, rank_1_skips, good_steps=good_steps, static_order=False, unused=unused):
        assert "rank 1" in message and "blocks.2" in message, message


def sad_rank_1(model: Steered, engine: Any, rank: int) -> None:
    model.sad = rank == 1
    step(model, engine, rank)


def sad_ranks(model: Steered, engine: Any, rank: int) -> None:
    model.sad = True
    step(model, engine, rank)


@pytest.mark.parametrize("good_steps", [0, 2])
def test_an_exception_inside_forward_on_one_rank_ends_all(good_steps: int, cluster: Cluster) -> None:
    """The rank keeps its error; the others learn whose it was, and which."""
    first, second = messages(cluster, sad_rank_1, good_steps=good_steps)
    assert second == "ValueError: a bad sample"
    assert "rank 1" in first and "a bad sample" in first, first


@pytest.mark.parametrize("good_steps", [0, 2])
def test_an_exception_inside_forward_on_all_ranks_is_that_exception(good_steps: int, cluster: Cluster) -> None:
    assert messages(cluster, sad_ranks, good_steps=good_steps) == ["ValueError: a bad sample"] * 2


class Bad(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("a bad gradient")


def sad_backward_of_rank_1(model: Steered, engine: Any, rank: int) -> None:
    if rank == 1:
        model.blocks[2].register_forward_hook(lambda module, args, out: Bad.apply(out))
    step(model, engine, rank)


def test_an_exception_inside_backward_on_one_rank_ends_all(cluster: Cluster) -> None:
    first, second = messages(cluster, sad_backward_of_rank_1)
    assert second == "ValueError: a bad gradient"
    assert "rank 1" in first and "a bad gradient" in first, first


def leaves(model: Steered, engine: Any, rank: int) -> None:
    """Rank 1 has no more data."""
    if rank == 0:
        step(model, engine, rank)


@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_rank_that_ends_sooner_is_named(good_steps: int, cluster: Cluster) -> None:
    first, second = messages(cluster, leaves, good_steps=good_steps)
    assert second == "nothing happened" and "rank 1" in first, (first, second)


def after_a_bad_sample(place: Place, caught: bool, options: dict[str, Any]) -> tuple[str, list[float]]:
    """Three steps, between which every rank catches an exception from inside forward, and goes on with the next sample."""
    model = built(Steered, place.rank)
    assert isinstance(model, Steered)
    losses = []
    with ml.shard(model, units=[Block], clip=1.0, optimizer=ml.AdamW(lr=1e-3), **options) as engine:
        for number in range(3):
            if caught:
                model.sad = True
                with pytest.raises(ValueError, match="a bad sample"):
                    own_loss(model, RUN.parts(place.rank, number)[0])
                model.sad = False
            loss = own_loss(model, RUN.parts(place.rank, number)[0])
            loss.backward()  # type: ignore[no-untyped-call]
            engine.step()
            losses.append(loss.item())
        with engine.gathered():
            return digest(model.parameters()), losses


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim", PARAMS])
def test_training_goes_on_after_an_exception_that_was_caught(strategy: str, cluster: Cluster) -> None:
    """To the bit as if the bad sample had not been there."""
    options = {"strategy": strategy}
    assert cluster.run(2, after_a_bad_sample, True, options) == cluster.run(2, after_a_bad_sample, False, options)


def after_a_nan(place: Place, options: dict[str, Any]) -> tuple[list[bool], list[float], list[str]]:
    """Four steps, of which the second has a NaN on the last rank."""
    model = built(Steered, place.rank)
    skipped, norms, digests = [], [], []
    with ml.shard(model, units=[Block], optimizer=ml.AdamW(lr=1e-3), **options) as engine:
        for number in range(4):
            [inputs] = RUN.parts(place.rank, number)
            if number == 1 and place.rank == place.world_size - 1:
                inputs["x"][0, 0] = torch.nan
            own_loss(model, inputs).backward()  # type: ignore[no-untyped-call]
            result = engine.step()
            assert result.skipped.shape == result.grad_norm.shape == ()
            skipped.append(bool(result.skipped))
            norms.append(result.grad_norm.item())
            with engine.gathered():
                digests.append(digest(model.parameters()))
    return skipped, norms, digests


@pytest.mark.few(4)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_on_one_rank_skips_the_step_on_all(strategy: str, clip: float, cluster: Cluster) -> None:
    """No parameter changes on any rank, and the next step does what it does."""
    for skipped, norms, digests in cluster.run(2, after_a_nan, {"strategy": strategy, "clip": clip}):
        assert skipped == [False, True, False, False]
        assert [norm == norm for norm in norms] == [True, False, True, True]
        assert digests[0] == digests[1] and len(set(digests)) == 3


def half_initialized(place: Place, how: str) -> str:
    """A model on meta of which some parameters get values, or none."""
    with torch.device("meta"):
        model = Tower()
    values = built(Tower).state_dict()
    del values["blocks.2.up.weight"]
    try:
        with ml.shard(model, units=[Block]) as engine:
            if how == "loaded in part":
                engine.load_state_dict({"model": values})
            own_loss(model, RUN.parts(place.rank, 0)[0])
    except Exception as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("how", ["not loaded", "loaded in part"])
def test_weights_without_values_are_named(how: str, cluster: Cluster) -> None:
    for message in cluster.run(2, half_initialized, how, timeout=PATIENCE):
        if how == "not loaded":
            assert "blocks.0.down.weight" in message and "others" in message, message
        else:
            assert "blocks.2.up.weight" in message and "blocks.0" not in message and "others" not in message, message


def too_few(model: Steered, engine: Any, rank: int) -> None:
    own_loss(model, RUN.parts(rank, 0)[0]).backward()  # type: ignore[no-untyped-call]
    engine.step()


def too_many(model: Steered, engine: Any, rank: int) -> None:
    step(model, engine, rank, backwards=3)


@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize(("fault", "got"), [(too_few, "1"), (too_many, "3")])
def test_backwards_are_counted(fault: Fault, got: str, good_steps: int, cluster: Cluster) -> None:
    for message in messages(cluster, fault, good_steps=good_steps, microbatches=2):
        assert "microbatches" in message and got in message and "2" in message, message


def no_backward(model: Steered, engine: Any, rank: int) -> None:
    engine.step()


@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_step_without_a_backward_is_an_error(good_steps: int, cluster: Cluster) -> None:
    for message in messages(cluster, no_backward, good_steps=good_steps):
        assert "backward" in message and "0" in message, message


def clipped_by_hand(model: Steered, engine: Any, rank: int) -> None:
    own_loss(model, RUN.parts(rank, 0)[0]).backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)


def reads_a_gradient(model: Steered, engine: Any, rank: int) -> None:
    own_loss(model, RUN.parts(rank, 0)[0]).backward()  # type: ignore[no-untyped-call]
    print(model.outlet.weight.grad)


@pytest.mark.parametrize("strategy", ["no_shard", PARAMS])
@pytest.mark.parametrize("fault", [clipped_by_hand, reads_a_gradient])
def test_gradients_are_not_there_to_be_clipped(fault: Fault, strategy: str, cluster: Cluster) -> None:
    for message in messages(cluster, fault, strategy=strategy):
        assert "clip=" in message, message


def reads_a_weight(model: Steered, engine: Any, rank: int) -> None:
    model.blocks[1].up.weight.sum().item()


def changes_a_weight(model: Steered, engine: Any, rank: int) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)


def changes_data(model: Steered, engine: Any, rank: int) -> None:
    model.outlet.weight.data.mul_(2)


def copies_a_weight(model: Steered, engine: Any, rank: int) -> None:
    model.outlet.weight.detach().clone()


def reads_it_in_another_unit(model: Steered, engine: Any, rank: int) -> None:
    """A penalty on the weights of a unit that is not running."""
    loss = own_loss(model, RUN.parts(rank, 0)[0]) + model.blocks[1].up.weight.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]


def calls_a_part(model: Steered, engine: Any, rank: int) -> None:
    """A layer of a unit by itself."""
    model.blocks[1].up(torch.zeros(2, 23))


def saves_it(model: Steered, engine: Any, rank: int) -> None:
    import io

    torch.save(list(model.parameters()), io.BytesIO())


READS = (reads_a_weight, changes_a_weight, changes_data, copies_a_weight, reads_it_in_another_unit, calls_a_part, saves_it)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", ["no_shard", PARAMS])
@pytest.mark.parametrize("fault", READS)
def test_weights_are_read_inside_of_gathered(fault: Fault, strategy: str, cluster: Cluster) -> None:
    """Also where they are whole in memory: what works with one strategy works with all."""
    for message in messages(cluster, fault, strategy=strategy):
        assert "gathered()" in message, message


def unfreezes(model: Steered, engine: Any, rank: int) -> None:
    model.blocks[1].requires_grad_(True)
    step(model, engine, rank)


class HalfFrozen(Steered):
    """The second block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def message_of_frozen(place: Place) -> str:
    model = built(HalfFrozen, place.rank)
    assert isinstance(model, Steered)
    try:
        with ml.shard(model, units=[Block]) as engine:
            step(model, engine, place.rank)
            unfreezes(model, engine, place.rank)
    except Exception as error:
        return str(error)
    return "nothing happened"


def test_what_was_frozen_from_the_start_is_not_trained_later(cluster: Cluster) -> None:
    """It has no optimizer state."""
    for message in cluster.run(2, message_of_frozen, timeout=PATIENCE):
        assert "requires_grad" in message and "blocks.1" in message, message


def evaluates_with_gradients(model: Steered, engine: Any, rank: int) -> None:
    model.eval()
    own_loss(model, RUN.parts(rank, 0)[0])
    model.train()
    step(model, engine, rank)


def test_evaluation_with_gradients_is_told_from_training(cluster: Cluster) -> None:
    for message in messages(cluster, evaluates_with_gradients):
        assert "no_grad" in message, message


def backward_of_an_old_graph(model: Steered, engine: Any, rank: int) -> None:
    """The weights have changed since its forward."""
    loss = own_loss(model, RUN.parts(rank, 0)[0])
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    engine.step()
    loss.backward()  # type: ignore[no-untyped-call]
    engine.step()


@pytest.mark.parametrize("strategy", ["no_shard", PARAMS])
def test_a_graph_does_not_outlive_its_weights(strategy: str, cluster: Cluster) -> None:
    for message in messages(cluster, backward_of_an_old_graph, strategy=strategy):
        assert "step" in message and "forward" in message and "nothing" not in message, message


class Viewed(Block):
    """Returns a view of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        """See Block."""
        return super().forward(x).unsqueeze(0)[0]


class ViewedInPlace(Steered):
    """In-place operations on what such a block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Viewed()

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
            x.mul_(0.9)
        return x


def message_of_view(place: Place) -> str:
    model = built(ViewedInPlace, place.rank)
    assert isinstance(model, Steered)
    try:
        with ml.shard(model, units=[Block]) as engine:
            for _ in range(3):
                step(model, engine, place.rank)
    except Exception as error:
        return str(error)
    return "nothing happened"


def test_an_operation_in_place_on_a_view_that_a_unit_returned_is_named(cluster: Cluster) -> None:
    """Autograd drops what was to run before the unit's backward. With FSDP2 this is a warning."""
    for message in cluster.run(2, message_of_view, timeout=PATIENCE):
        assert "blocks.1" in message and "view" in message and "in place" in message, message


def after_close(model: Steered, engine: Any, rank: int) -> None:
    engine.close()
    engine.step()


def test_a_closed_engine_says_so(cluster: Cluster) -> None:
    for message in messages(cluster, after_close):
        assert "close()" in message, message


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "strategy": (lambda: {"strategy": "zero3"}, ("zero3", "optim_grads_params")),
    "no unit": (lambda: {"units": [nn.Conv2d]}, ("units", "Block")),
    "unit of another kind": (lambda: {"units": ["Block"]}, ("Block",)),
    "optimizer": (lambda: {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, ("SGD",)),
    "strangers": (lambda: {"optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(1))])}, ("AdamW",)),
    "slots": (lambda: {"param_slots": 0}, ("param_slots", "0")),
    "microbatches": (lambda: {"microbatches": 0}, ("microbatches", "0")),
    "shard size": (lambda: {"shard_size": 3}, ("shard_size", "3")),
    "reduction": (lambda: {"reduction": "max"}, ("reduction", "max", "mean")),
    "offload": (lambda: {"optimizer_offload": "disk"}, ("optimizer_offload", "disk")),
    "clip": (lambda: {"clip": -1.0}, ("clip", "-1")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_are_checked_by_name(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(Exception) as error:
        ml.shard(built(Tower), **({"units": [Block]} | make()))
    assert all(word in str(error.value) for word in words), error.value


def ranks_differ(place: Place, what: str) -> str:
    """Another model, or other arguments, on rank 1."""
    model = built(Tower)
    options: dict[str, Any] = {"units": [Block]}
    if place.rank == 1:
        if what == "width":
            model.outlet = nn.Linear(23, 17)
        elif what == "frozen":
            model.blocks[1].requires_grad_(False)  # type: ignore[index]
        else:
            options["strategy"] = "optim"
    try:
        ml.shard(model, **options).close()
    except Exception as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize(("what", "word"), [("width", "outlet"), ("frozen", "blocks.1"), ("strategy", "strategy")])
def test_ranks_that_shard_other_things_are_refused(what: str, word: str, cluster: Cluster) -> None:
    for message in cluster.run(2, ranks_differ, what, timeout=PATIENCE):
        assert word in message, message
