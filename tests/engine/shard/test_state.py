"""State dicts: what one kind of run saves with torch.distributed.checkpoint, another loads and goes on with."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from megatron_llama.engine.pieces import column_state, shard_pieces
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.order import MODEL_STATE, AccessOrder
from megatron_llama.engine.shard.placeholders import ShardedParameterError
from megatron_llama.engine.shard.shard import shard
from megatron_llama.engine.shard.user_groups import group
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness import Cluster

SINGLE = Place(0, 1, 0)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
GLOBAL_BATCH = 4


class Block(nn.Module):
    """Rows that do not divide by the ranks, a convolution of three dims, and a buffer that every pass changes."""

    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.conv = nn.Conv1d(10, 10, 3, padding=1, bias=False)
        self.up = shared or nn.Linear(10, 7)
        self.down = nn.Linear(7, 10)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x + self.down(torch.tanh(self.up(self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2))))


class Model(nn.Module):
    """A tied head, two blocks that share a layer, a constant that is not saved, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        first = Block()
        self.blocks = nn.ModuleList([first, Block(first.up)])
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("ramp", torch.arange(10.0) / 10, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.ramp
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def model(seed: int = 0) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


def adamw(module: nn.Module, lr: float) -> torch.optim.AdamW:
    """In two groups that are no others than torch's."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    blocks = [p for name, p in trained.items() if name.startswith("blocks")]
    rest = [p for name, p in trained.items() if not name.startswith("blocks")]
    return torch.optim.AdamW([{"params": blocks, "weight_decay": 0.1}, {"params": rest, "lr": 2 * lr}], lr=lr, betas=(0.8, 0.95))


class Plain:
    """torch alone: one process, or FSDP2 over all."""

    def __init__(self, place: Place, *, lr: float = 1e-2, seed: int = 0) -> None:
        self.place = place
        self.model = model(seed)
        if place.world_size > 1:
            fully_shard(self.model)  # as one: FSDP2 has no layers that two units share
        self.optimizer = adamw(self.model, lr)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def take(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def close(self) -> None:
        pass


class Ours:
    """The engine, from the same lines."""

    def __init__(self, place: Place, *, lr: float = 1e-2, seed: int = 0, meta: bool = False, **options: Any) -> None:
        self.place = place
        with torch.device("meta" if meta else "cpu"):
            self.model = Model() if meta else model(seed)
        self.engine: ModuleEngine = shard(self.model, units=[Block], optimizer=adamw(self.model, lr), **options)
        self.step = self.engine.step
        self.state = self.engine.state_dict
        self.take = self.engine.load_state_dict
        self.close = self.engine.close


Run = Plain | Ours


def build(place: Place, kind: str, **options: Any) -> Run:
    """``torch``, or a strategy, with ``exact`` behind it where the optimizer is offloaded, and ``hybrid``."""
    strategy, _, more = kind.partition(" ")
    if strategy == "torch":
        return Plain(place, **options)
    if more == "exact":
        options |= {"optimizer_offload": "exact"}
    if more == "hybrid":
        options |= {"shard_size": 2}
    if more == "meta":
        options |= {"meta": True}
    return Ours(place, strategy=strategy, **options)


def losses(run: Run, first: int, steps: int) -> list[float]:
    """The mean loss of each step, over one global batch whatever the number of ranks."""
    place = run.place
    found = []
    for step in range(first, first + steps):
        ids = torch.randint(13, (GLOBAL_BATCH, 6), generator=torch.Generator().manual_seed(step))
        own = ids.chunk(place.world_size)[place.rank]
        loss = F.cross_entropy(run.model(own).flatten(0, 1), own.roll(-1, 1).flatten())
        loss.backward()
        run.step()
        total = loss.detach().clone()
        if place.world_size > 1:
            dist.all_reduce(total)
        found.append(float(total) / place.world_size)
    return found


def train_and_save(place: Place, kind: str, folder: str) -> list[float]:
    """Two steps, a save, and two more."""
    run = build(place, kind)
    losses(run, 0, 2)
    dcp.save(run.state(), checkpoint_id=folder)
    after = losses(run, 2, 2)
    run.close()
    return after


def load_and_train(place: Place, kind: str, folder: str) -> tuple[list[float], list[float], int]:
    """The losses after a load into a run that had other values and another learning rate, its rates, and the passes that it counts."""
    run = build(place, kind, lr=7.0, **({} if kind.endswith("meta") else {"seed": 3}))
    if "meta" not in kind:
        losses(run, 20, 1)  # a state of its own
    state = run.state()
    dcp.load(state, checkpoint_id=folder)
    run.take(state)
    if kind.endswith("meta"):
        with run.engine.gathered(modify=True):  # not saved, so nobody loads it
            run.model.ramp.copy_(model().ramp)
    passes = int(run.model.blocks[1].passes)
    optimizer = run.optimizer if isinstance(run, Plain) else run.engine.optimizer
    after = losses(run, 2, 2)
    run.close()
    return after, [group["lr"] for group in optimizer.param_groups], passes


def run_on(cluster: Cluster, world: int, function: Any, *args: Any) -> Any:
    return function(SINGLE, *args) if world == 1 else cluster.run(world, function, *args)[0]


@pytest.mark.few(1, all=8)
@pytest.mark.parametrize(
    ("saver", "saving", "loader", "loading"),
    [
        ("optim_grads_params", 2, "torch", 2),  # ours to FSDP2
        ("torch", 2, "optim_grads_params", 2),  # FSDP2 to ours
        ("torch", 4, "optim", 2),
        ("optim", 2, "torch", 4),
        ("torch", 1, "optim_grads_params", 4),
        ("optim_grads_params", 4, "torch", 1),
        ("optim_grads_params", 1, "torch", 1),
        ("torch", 1, "optim_grads_params", 1),
        ("optim_grads_params", 1, "optim_grads_params", 2),
        ("optim_grads_params", 4, "optim_grads", 1),
        ("no_shard", 2, "optim_grads_params", 4),
        ("optim_grads_params", 2, "no_shard", 4),
        ("optim_grads_params hybrid", 4, "torch", 2),
        ("torch", 2, "optim_grads_params hybrid", 4),
        ("optim_grads exact", 2, "torch", 2),
        ("torch", 2, "optim_grads_params exact", 2),
        ("torch", 2, "optim_grads_params meta", 2),
    ],
)
def test_what_one_saves_another_goes_on_with(cluster: Cluster, tmp_path: Path, saver: str, saving: int, loader: str, loading: int) -> None:
    expected = run_on(cluster, saving, train_and_save, saver, str(tmp_path))
    found, rates, passes = run_on(cluster, loading, load_and_train, loader, str(tmp_path))
    assert found == pytest.approx(expected, abs=2e-6)
    assert rates == [1e-2, 2e-2]
    assert passes == 2


def shapes(place: Place, strategy: str, shard_size: int) -> dict[str, Any]:
    run = Ours(place, strategy=strategy, shard_size=shard_size)
    losses(run, 0, 1)
    state = run.state()
    weights = state["model"]
    assert list(weights) == list(model().state_dict())
    assert weights["head.weight"] is not None and torch.equal(weights["head.weight"].full_tensor(), weights["embed.weight"].full_tensor())
    kinds = {name: value.placements for name, value in weights.items() if isinstance(value, DTensor)}
    local = {name: tuple(value.to_local().shape) for name, value in weights.items() if isinstance(value, DTensor)}
    with run.engine.gathered():
        whole = dict(run.model.state_dict())
        assert not any(isinstance(value, DTensor) for value in whole.values())
    equal = all(torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, whole[name]) for name, value in weights.items())
    # All are copies.
    for value in weights.values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    again = run.model.state_dict()
    kept = all(torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, whole[name]) for name, value in again.items())
    optimizer = state["optimizer"]
    reference = torch.optim.AdamW(nn.Linear(1, 1).parameters()).state_dict()["param_groups"][0]
    groups_as_torch = all(set(one) == set(reference) for one in optimizer["param_groups"])
    steps = {float(one["step"]) for one in optimizer["state"].values()}
    names = [name for one in optimizer["param_groups"] for name in one["params"]]
    run.close()
    return {
        "kinds": set(kinds.values()),
        "local": local,
        "plain": [name for name, value in weights.items() if not isinstance(value, DTensor)],
        "flags": [equal, kept, groups_as_torch, set(names) == set(optimizer["state"])],
        "steps": steps,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "world", "shard_size"), [("optim", 2, 0), ("optim_grads_params", 4, 0), ("optim_grads_params", 4, 2)]
)
def test_the_form_is_that_of_fsdp2(cluster: Cluster, strategy: str, world: int, shard_size: int) -> None:
    ranks = cluster.run(world, shapes, strategy, shard_size)
    hybrid = shard_size > 0
    parts = shard_size or world
    for rank, found in enumerate(ranks):
        assert found["kinds"] == {(Replicate(), Shard(0)) if hybrid else (Shard(0),)}
        assert found["plain"] == ["blocks.0.passes", "blocks.1.passes"]
        rows = [len(part) for part in torch.empty(7).chunk(parts)][rank % parts]
        assert found["local"]["blocks.0.up.weight"] == (rows, 10) and found["local"]["blocks.0.up.bias"] == (rows,)
        assert found["flags"] == [True] * 4
        assert found["steps"] == {1.0}


def saved_by_rank_0_alone(place: Place, folder: str, options: dict[str, Any]) -> list[float]:
    """The habit of users of DDP: no other rank takes part. The losses of the steps afterwards."""
    run = Ours(place, strategy="no_shard", **options)
    losses(run, 0, 2)
    if place.rank == 0:
        state = run.model.state_dict()
        torch.save(state, f"{folder}/model.pt")
        save_file({name: value for name, value in state.items() if name not in ("head.weight", *SHARED)}, f"{folder}/model.safetensors")
        torch.save(run.engine.state_dict(), f"{folder}/all.pt")
    after = losses(run, 2, 2)
    run.close()
    return after


SHARED = ("blocks.1.up.weight", "blocks.1.up.bias")


@pytest.mark.parametrize("options", [{}, {"optimizer_offload": "exact"}])
def test_without_shards_rank_0_saves_the_whole_model_alone(cluster: Cluster, tmp_path: Path, options: dict[str, Any]) -> None:
    after, other = cluster.run(2, saved_by_rank_0_alone, str(tmp_path), options)
    assert after == other
    plain = model(seed=8)
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == len(plain.state_dict()) - 3 and all(torch.equal(value, plain.state_dict()[name]) for name, value in stored.items())
    again = Ours(SINGLE, **options)
    again.take(torch.load(tmp_path / "all.pt"))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in again.state()["model"].items())
    assert losses(again, 2, 2) == pytest.approx(after, abs=2e-6)


@pytest.mark.parametrize(("options", "meetings"), [({"optimizer_offload": "exact"}, 0), ({"optimizer_offload": "zenflow"}, 1)])
def test_ranks_meet_where_a_state_makes_updates_that_were_put_off(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], meetings: int
) -> None:
    """On rank 0 alone they would come earlier than on the others, and the replicas would go apart in silence."""
    met: list[int] = []
    monkeypatch.setattr(AccessOrder, "agree", lambda order, code: met.append(code))
    run = Ours(SINGLE, **options)
    losses(run, 0, 1)
    run.model.state_dict()
    run.close()
    assert met.count(MODEL_STATE) == meetings


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def bits(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a state of one process."""
    moments = {f"{what} of {name}": value for name, one in state["optimizer"]["state"].items() for what, value in one.items()}
    return {**state["model"], **moments}


def test_a_state_comes_back_to_the_bit() -> None:
    run = Ours(SINGLE, dtype=torch.bfloat16)
    losses(run, 0, 3)
    state = run.state()
    assert state["model"]["embed.weight"].dtype == torch.float32
    again = Ours(SINGLE, dtype=torch.bfloat16, seed=1)
    again.take(state)
    found = bits(again.state())
    assert found.keys() == bits(state).keys() and all(torch.equal(value, found[name]) for name, value in bits(state).items())
    assert losses(run, 3, 2) == losses(again, 3, 2)


def refused(place: Place) -> tuple[str, bool]:
    run = Ours(place)
    losses(run, 0, 1)
    state = run.state()
    before = {name: value.clone() for name, value in state["model"].items()}
    if place.rank == 1:  # one rank is enough
        weights, optimizer = state["model"], state["optimizer"]
        del weights["blocks.0.conv.weight"], optimizer["state"]["blocks.1.down.bias"]
        weights["extra"] = torch.zeros(1)
        weights["blocks.0.down.bias"] = torch.zeros(3)
        weights["blocks.0.passes"] = 3
        optimizer["state"]["blocks.0.norm.bias"]["exp_avg"] = torch.zeros(4)
        optimizer["state"]["blocks.0.norm.weight"]["max_exp_avg_sq"] = torch.zeros(10)
        optimizer["param_groups"][0]["eps"] = -1.0
    try:
        run.take(state)
    except CheckpointError as error:
        after = run.state()["model"]
        unchanged = all(
            torch.equal(*(one.full_tensor() if isinstance(one, DTensor) else one for one in (value, after[name])))
            for name, value in before.items()
        )
        run.close()
        return str(error), unchanged
    return "", False


def test_all_that_is_wrong_is_listed_before_anything_is_changed(cluster: Cluster) -> None:
    (error, unchanged), other = cluster.run(2, refused)
    assert other == (error, unchanged) and unchanged
    found = [line.strip(" -").split(", expected")[0] for line in error.splitlines()]
    assert found[0] == "rank 1: engine.load_state_dict:"
    assert sorted(line for line in found[1:] if not line.startswith("an option of")) == sorted(
        [
            "blocks.0.conv.weight: got nothing",
            "optimizer state of blocks.1.down.bias: got nothing",
            "extra: got a value",
            "blocks.0.down.bias: got (3,)",
            "blocks.0.passes: got int",
            "exp_avg of blocks.0.norm.bias: got (4,)",
            "max_exp_avg_sq of blocks.0.norm.weight: got a value",
        ]
    )
    assert "an option of blocks.0.norm.weight is none: blocks.0.norm.weight: got eps=-1.0" in found


def with_another_count(place: Place, options: dict[str, Any], everywhere: bool) -> str:
    """The error for a state in which one parameter has made more steps; empty if there is none."""
    with Ours(place, **options).engine as engine:
        state = engine.state_dict()
        if everywhere or place.rank == 1:
            state["optimizer"]["state"]["blocks.1.norm.weight"]["step"] = torch.tensor(5.0)
        try:
            engine.load_state_dict(state)
        except CheckpointError as error:
            return str(error)
        steps = {name: int(own["step"]) for name, own in engine.state_dict()["optimizer"]["state"].items()}
        assert steps.pop("blocks.1.norm.weight") == 5 and set(steps.values()) == {0}
        return ""


def test_counts_differ_where_updates_can(cluster: Cluster) -> None:
    assert cluster.run(2, with_another_count, {}, True) == ["", ""]
    for error in cluster.run(2, with_another_count, {}, False):
        assert error.startswith("engine.load_state_dict: got other step counts on rank 1 than on rank 0")
    for error in cluster.run(2, with_another_count, {"optimizer_offload": "exact"}, True):
        assert "optimizer: got other step counts in one bucket: 0 of blocks.0.norm.weight, 5 of blocks.1.norm.weight" in error


def test_what_is_missing_may_stay() -> None:
    run = Ours(SINGLE)
    state = run.state()
    half = {name: value + 1 for name, value in state["model"].items() if name.startswith("blocks.0") and "passes" not in name}
    with pytest.raises(CheckpointError, match=r"embed.weight: got nothing"):
        run.take({"model": half})
    run.take({"model": {**half, "unknown": torch.zeros(2)}}, strict=False)
    found = run.state()["model"]
    assert all(torch.equal(found[name], half.get(name, value)) for name, value in state["model"].items() if ".up." not in name)


def test_one_name_of_a_shared_parameter_is_enough() -> None:
    run = Ours(SINGLE)
    weights = model(5).state_dict()
    del weights["head.weight"], weights["blocks.1.up.weight"], weights["blocks.0.up.bias"]
    run.take({"model": weights})
    found = run.state()["model"]
    assert torch.equal(found["head.weight"], weights["embed.weight"])
    assert torch.equal(found["blocks.0.up.bias"], weights["blocks.1.up.bias"])


@pytest.mark.parametrize("state", [{}, {"weights": {}}, {"embed.weight": torch.zeros(1)}, [1]])
def test_another_form_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r'state: got .*, expected {"model": ..., "optimizer": ...}'):
        Ours(SINGLE).take(state)


def test_a_group_gets_one_rate() -> None:
    run = Ours(SINGLE)
    state = run.state()
    state["optimizer"]["param_groups"] = [{"params": [name], "lr": 0.5 if "norm" in name else 0.25} for name in state["optimizer"]["state"]]
    with pytest.raises(CheckpointError, match=r"lr: got other values in one group: 0.5 of .*, 0.25 of"):
        run.take(state)
    del state["optimizer"]["param_groups"]
    run.take(state)
    assert [one["lr"] for one in run.engine.param_groups] == [1e-2, 2e-2]


def test_one_whole_bucket_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ours(SINGLE)
    values = run.engine._values
    gather = values.gather
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def watched(*args: Any) -> Tensor:
        assert not any(storage() is not None for storage in alive)
        whole = gather(*args).clone()
        kept = whole.untyped_storage()
        alive.append(weakref.ref(kept))
        whole.kept = kept
        return whole

    monkeypatch.setattr(values, "gather", watched)
    run.state()
    # Master and moments of each bucket once.
    assert len(alive) == sum(len(values.tensors(bucket.index)) for bucket in values.plan.buckets) > 9
    with run.engine.gathered():
        pass


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def through_torch(
    place: Place, saver: str, loader: str, getting: StateDictOptions | None, setting: StateDictOptions | None
) -> tuple[list[float], list[float], list[float]]:
    """The losses of two steps after two others, and those of another run that has got the state by torch's functions; its rates."""
    first, second = build(place, saver), build(place, loader, lr=7.0, seed=3)
    losses(first, 0, 2)
    losses(second, 20, 1)
    optimizers = [run.optimizer if isinstance(run, Plain) else run.engine.optimizer for run in (first, second)]
    weights = get_model_state_dict(first.model, options=getting)
    state = get_optimizer_state_dict(first.model, optimizers[0], options=getting)
    if getting is FULL and place.rank:
        assert weights == {}
    # Before the first run goes on: torch hands out what it trains.
    assert not set_model_state_dict(second.model, weights, options=setting).missing_keys
    set_optimizer_state_dict(second.model, optimizers[1], state, options=setting)
    expected, found = losses(first, 2, 2), losses(second, 2, 2)
    rates = [group["lr"] for group in optimizers[1].param_groups]
    for run in (first, second):
        run.close()
    return expected, found, rates


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("saver", "loader", "world", "getting", "setting"),
    [
        ("optim_grads_params", "optim_grads_params", 2, None, None),
        ("optim", "optim_grads_params", 2, FULL, BROADCAST),
        ("no_shard", "optim_grads", 2, StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True)),
        ("torch", "optim_grads_params", 2, None, None),
        ("optim_grads_params", "torch", 2, None, None),
        ("torch", "optim", 2, FULL, BROADCAST),
        ("optim_grads_params hybrid", "no_shard", 4, FULL, BROADCAST),
        ("optim exact", "optim_grads_params exact", 2, FLAT, FLAT),
    ],
)
def test_torchs_own_functions_get_and_set_the_state(
    cluster: Cluster, saver: str, loader: str, world: int, getting: StateDictOptions | None, setting: StateDictOptions | None
) -> None:
    for expected, found, rates in cluster.run(world, through_torch, saver, loader, getting, setting):
        assert found == pytest.approx(expected, abs=2e-6) and rates == [1e-2, 2e-2]


def test_the_optimizer_has_numbers_as_torch_has() -> None:
    run, plain = Ours(SINGLE), Plain(SINGLE)
    losses(run, 0, 2)
    losses(plain, 0, 2)
    state, reference = run.engine.optimizer.state_dict(), plain.optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in reference["param_groups"]]
    for number, own in reference["state"].items():
        assert own.keys() == state["state"][number].keys()
        assert all(torch.allclose(value, state["state"][number][what], atol=1e-6) for what, value in own.items())
    # Those of torch, names, and numbers in another order, of which the names say what they mean.
    again = Ours(SINGLE, lr=3.0, seed=4)
    again.engine.optimizer.load_state_dict(reference)
    by_name = again.state()["optimizer"]
    assert torch.allclose(by_name["state"]["embed.weight"]["exp_avg"], run.state()["optimizer"]["state"]["embed.weight"]["exp_avg"], atol=1e-6)
    other = {
        "state": {100 - number: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [100 - number for number in reversed(group["params"])], "param_names": list(reversed(group["param_names"]))}
            for group in reversed(state["param_groups"])
        ],
    }
    for given in (other, run.state()["optimizer"]):
        third = Ours(SINGLE, lr=3.0, seed=4)
        third.engine.optimizer.load_state_dict(given)
        found, expected = third.engine.optimizer.state_dict(), run.engine.optimizer.state_dict()
        assert [group["lr"] for group in found["param_groups"]] == [1e-2, 2e-2]
        for number, own in expected["state"].items():
            assert all(torch.equal(value, found["state"][number][what]) for what, value in own.items())
    del reference["param_groups"][0]["params"][-1]
    with pytest.raises(CheckpointError, match="optimizer state of 0: got a value, expected nothing"):
        again.engine.optimizer.load_state_dict(reference)


def test_the_model_loads_a_state_as_the_engine_does() -> None:
    run = Ours(SINGLE)
    given = model(5).state_dict()
    assert tuple(run.model.load_state_dict(given)) == ([], [])
    assert all(torch.equal(value, given[name]) for name, value in run.state()["model"].items())
    del given["head.weight"], given["blocks.0.passes"], given["blocks.0.up.bias"], given["frozen.bias"]
    given["other"] = torch.zeros(1)
    loaded = run.model.load_state_dict(given, strict=False)
    assert sorted(loaded.missing_keys) == ["blocks.0.passes", "frozen.bias"] and loaded.unexpected_keys == ["other"]
    with pytest.raises(CheckpointError, match="other: got a value"):
        run.model.load_state_dict(given)
    around = nn.Sequential(run.model)
    with pytest.raises(ShardedParameterError, match=r"got a module around a model .* call load_state_dict of the model that shard"):
        around.load_state_dict(around.state_dict())
    with run.engine.gathered(modify=True):
        run.model.load_state_dict(model(6).state_dict())
    assert torch.equal(run.state()["model"]["head.weight"], model(6).head.weight)


def saved_pretrained(place: Place, strategy: str, folder: str) -> list[str]:
    """What a rank says of a folder that it tries to write in several ways, and what is then in it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config)
    engine = shard(module, units=[type(module.model.layers[0])], strategy=strategy)
    said = []

    def attempt(**keywords: Any) -> None:
        own = Path(folder) / f"{place.rank} {len(said)}"
        try:
            module.save_pretrained(own, **keywords)
            if place.rank:  # rank 0 writes
                said.append("right")
                return
            weights = load_file(own / "model.safetensors")
            said.append("right" if all(torch.equal(weights[name], value) for name, value in expected.items() if name in weights) else "wrong")
        except ShardedParameterError as error:
            assert not own.exists()
            said.append(str(error))

    expected = {name: whole(value) for name, value in module.state_dict().items()}
    attempt()
    attempt(state_dict=module.state_dict())
    attempt(state_dict=expected)
    with engine.gathered():
        attempt()
    with engine.gathered(only="lm_head.weight"):
        attempt()
    with engine.gathered(rank0=True, to="cpu"):
        attempt()
    engine.close()
    return said


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_part_of_a_model_is_not_saved_as_the_whole(cluster: Cluster, tmp_path: Path, strategy: str) -> None:
    do = "with engine.gathered(): model.save_pretrained(...)"
    for rank, (plainly, parts, given, inside, part_inside, rank0) in enumerate(
        cluster.run(2, saved_pretrained, strategy, str(tmp_path))
    ):
        assert given == inside == "right"
        assert do in part_inside
        assert rank0 == "right" if rank == 0 else do in rank0
        for said in (plainly, parts):
            assert said == "right" if strategy == "no_shard" else do in said


class Counting(nn.Module):
    """It keeps something of its own in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_and_a_wrapped_module() -> None:
    module = nn.Sequential(torch.compile(Counting(), backend="eager"))
    engine = shard(module, units=[Counting])
    state = engine.state_dict()
    assert set(state["model"]) == {"0.linear.weight", "0.linear.bias", "0._extra_state"}
    state["model"]["0._extra_state"] = {"count": 9}
    engine.load_state_dict(state)
    assert module[0]._orig_mod.count == 9


def test_groups_of_the_engine_are_saved_by_name() -> None:
    module = model()
    engine = shard(module, units=[Block], optimizer=AdamW(groups=[group("blocks.*", lr=0.5)]))
    groups = engine.state_dict()["optimizer"]["param_groups"]
    assert [(one["lr"], one["weight_decay"]) for one in groups] == [(0.5, 0.01), (0.5, 0.0), (1e-3, 0.01)]
    assert groups[2]["params"] == ["embed.weight"]
    engine.param_groups[0]["weight_decay"] = 0.7
    saved = engine.state_dict()
    other = shard(model(), units=[Block], optimizer=AdamW(groups=[group("blocks.*", lr=0.5)]))
    other.load_state_dict(saved)
    assert [one["weight_decay"] for one in other.param_groups] == [0.7, 0.0, 0.01], "as torch.optim takes them"


def zenflow_moments(place: Place) -> bool:
    """ZenFlow counts updates column by column: a saved moment, corrected by the saved step, is the live one corrected by its column's."""
    run = Ours(place, optimizer_offload="zenflow", zenflow_topk_ratio=0.3, zenflow_update_interval="3", zenflow_full_warm_up_rounds=1)
    losses(run, 0, 7)
    state = run.state()
    saved = {name: whole(value) for name, value in bits(state).items()}  # on all ranks in one order
    live = {column.spec.name: column for column in column_state(run.engine._engine)}
    counts = {int(count) for column in live.values() for count in column.updates}
    assert len(counts) > 1
    beta1, beta2 = 0.8, 0.95
    good = []
    for piece in shard_pieces(run.engine._engine):
        name, low = piece.rectangle.name, piece.rectangle.offset
        if name not in live:
            continue
        step = float(saved[f"step of {name}"])
        updates = live[name].updates.view(piece.rectangle.shape[1:])
        for what, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)):
            place_of = tuple(slice(start, start + size) for start, size in zip(low, piece.rectangle.size, strict=True))
            corrected = saved[f"{what} of {name}"][place_of].double() / (1 - beta**step)
            expected = piece.tensors[what].double() / (1 - beta ** updates[place_of[1:]].clamp(min=1))
            good.append(torch.allclose(corrected, expected, rtol=1e-5, atol=0))
    again = Ours(place, seed=4, optimizer_offload="zenflow", zenflow_topk_ratio=0.3, zenflow_update_interval="3")
    again.take(state)
    found = bits(again.state())
    equal = [torch.equal(value, whole(found[name])) for name, value in saved.items()]
    after = losses(again, 7, 2)
    run.close()
    again.close()
    return all(good) and len(good) > 4 and all(equal) and after[1] < after[0]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_moments_of_zenflow_are_saved_as_those_of_adamw(cluster: Cluster, world: int) -> None:
    assert run_on(cluster, world, zenflow_moments)
