"""``ml.Muon`` around any module makes what torch.optim.Muon and torch.optim.AdamW make of the whole model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.engine.test_muon import iterating_in_bf16
from tests.harness import Cluster

SINGLE = Place(0, 1, 0)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH, WORDS, LENGTH, STEPS, CLIP = 12, 17, 6, 20, 0.3
LR, DECAY, BETAS = 2e-2, 0.1, (0.9, 0.95)
MATRICES = ("*.qkv.weight", "*.out.weight", "*.mix")
"""The patterns of what Muon has without a word of the user."""


class Block(nn.Module):
    """Matrices, one of them three in one, a parameter of two dims, a convolution, a table, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Parameter(torch.randn(LENGTH, LENGTH) / LENGTH)
        self.conv = nn.Conv1d(WIDTH, 8, 3, padding=1)
        self.table = nn.Embedding(WORDS, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        query, key, value = self.qkv(self.mix @ self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        local = self.conv(x.transpose(1, 2)).transpose(1, 2) + self.table(ids)
        return x + F.pad(local, (0, WIDTH - 8))


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.without: int | None = None
        """The number of a block that is left out."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number != self.without:
                x = block(x, ids)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def net(*, tied: bool = False, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net(tied).to(dtype)


def part(step: int, number: int) -> Tensor:
    """One of the four microbatches of a step, whoever has it."""
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + number))


class Twin:
    """torch.optim.Muon for what fits ``matrices``, flattened to two dims, and torch.optim.AdamW for the rest, of a whole model."""

    def __init__(self, module: Net, matrices: Sequence[str] = MATRICES, **muon: Any) -> None:
        self.module = module
        self.flat: list[tuple[nn.Parameter, nn.Parameter]] = []
        rest: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in module.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in matrices):
                self.flat.append((parameter, nn.Parameter(parameter.data.view(parameter.shape[0], -1))))
            else:
                rest[parameter.dim() > 1].append(parameter)
        options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"} | muon
        self.muon = torch.optim.Muon([matrix for _, matrix in self.flat], **options)
        groups = [{"params": rest[True], "weight_decay": DECAY}, {"params": rest[False], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS)

    def step(self, number: int, weight: Callable[[int], float] = lambda part: 1.0) -> tuple[float, float]:
        """Loss and norm."""
        losses = [weight(index) * self.module(part(number, index)) / 4 for index in range(4)]
        loss = torch.stack(losses).sum()
        loss.backward()
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        # As the engine, whose factor is in fp32 before it is rounded to bf16.
        scale = ((norm + 1e-6) / CLIP).clamp(min=1.0).to(torch.float32)
        for parameter in trained:
            parameter.grad /= scale
        for parameter, matrix in self.flat:
            matrix.grad = None if parameter.grad is None else parameter.grad.view(matrix.shape)
        for optimizer in (self.muon, self.adamw):
            optimizer.step()
        self.module.zero_grad()
        return loss.item(), norm.item()


def muon(**options: Any) -> ml.Muon:
    return ml.Muon(**{"lr": LR, "weight_decay": DECAY, "betas": BETAS} | options)


def step_of(engine: ml.ModuleEngine, place: Place, number: int, weight: Callable[[int], float] = lambda part: 1.0) -> tuple[float, float]:
    """Loss and norm of one step, as those of the twin."""
    loss = torch.zeros((), dtype=torch.float64)
    each = 4 // place.world_size
    for microbatch in range(each):
        index = place.rank * each + microbatch
        own = weight(index) * engine.model(part(number, index)) / each
        own.backward()
        loss += own.detach() / place.world_size
    norm = engine.step().grad_norm.item()
    if place.world_size > 1:
        dist.all_reduce(loss)
    return loss.item(), norm


def sharded(place: Place, module: Net, optimizer: Any, **options: Any) -> ml.ModuleEngine:
    return ml.shard(module, units=[Block], optimizer=optimizer, clip=CLIP, microbatches=4 // place.world_size, **options)


def distance(module: Net, twin: Net) -> float:
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    return max((own - other).abs().max().item() for own, other in pairs)


@iterating_in_bf16()
def trained(
    place: Place, optimizer: ml.Muon, matrices: Sequence[str], torchs: dict[str, Any], tied: bool, change: bool, options: dict[str, Any]
) -> float:
    """The largest difference of losses, norms and weights from the twin. ``change``: rates, momentum and decay of all groups in each step."""
    module, twin = net(tied=tied), Twin(net(tied=tied), matrices, **torchs)
    engine = sharded(place, module, optimizer, **options)
    differences = []
    for step in range(STEPS):
        if change:
            for group in (*engine.param_groups, *twin.muon.param_groups, *twin.adamw.param_groups):
                group["lr"] = LR / (1 + step)
                if "momentum" in group:
                    group["momentum"] = 0.5 + 0.02 * step
                    group["weight_decay"] = 0.01 * step
        found, expected = step_of(engine, place, step), twin.step(step)
        differences += [abs(one - other) for one, other in zip(found, expected, strict=True)]
    with engine.gathered(modify=True):
        differences.append(distance(module, twin.module))
    engine.close()
    return max(differences)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{strategy}, {ranks} ranks": (ranks, {"strategy": strategy}) for strategy in STRATEGIES for ranks in (2, 4)},
    "hybrid": (4, {"shard_size": 2}),
    "hybrid optim": (4, {"shard_size": 2, "strategy": "optim", "bucket_size": 700}),
    "any order": (2, {"static_order": False}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_torch_does(case: str, cluster: Cluster) -> None:
    ranks, options = CASES[case]
    assert max(cluster.run(ranks, trained, muon(), MATRICES, {}, False, False, options)) < 1e-9


KINDS: dict[str, tuple[ml.Muon, Sequence[str], dict[str, Any]]] = {
    "more, flattened": (muon(groups=[ml.group("*.conv.weight", kind="muon")]), (*MATRICES, "*.conv.weight"), {}),
    "fewer": (muon(groups=[ml.group("*.mix", kind="adamw")]), MATRICES[:2], {}),
    "the head as well": (muon(groups=[ml.group("head*", kind="muon")]), (*MATRICES, "head.weight"), {}),
    "other options": (
        muon(lr=3e-2, adamw_lr=LR, nesterov=False, momentum=0.8, ns_steps=3, adjust_lr_fn="original"),
        MATRICES,
        {"lr": 3e-2, "nesterov": False, "momentum": 0.8, "ns_steps": 3, "adjust_lr_fn": "original"},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_user_says_what_muon_has(kind: str, cluster: Cluster) -> None:
    optimizer, matrices, torchs = KINDS[kind]
    assert max(cluster.run(2, trained, optimizer, matrices, torchs, False, False, {})) < 1e-9


def test_tied_weights_and_options_that_change(cluster: Cluster) -> None:
    for tied, change in ((True, False), (False, True)):
        assert max(cluster.run(2, trained, muon(), MATRICES, {}, tied, change, {})) < 1e-9
    assert trained(SINGLE, muon(), MATRICES, {}, True, True, {"dtype": torch.float64}) < 1e-9


def bits(engine: ml.ModuleEngine) -> dict[str, Tensor]:
    """Everything that a step may change, of this rank."""
    found = {name: piece.values.clone() for name, piece in engine.masters().items()}
    for name, state in engine.state_dict()["optimizer"]["state"].items():
        for what, value in state.items():
            found[f"{what} of {name}"] = value.to_local() if hasattr(value, "to_local") else value
    return found


def skipped(place: Place, strategy: str) -> bool:
    """Whether a NaN on the last rank changes no bit, and the steps after it are as if it had not been."""
    engines = [sharded(place, net(dtype=torch.float32), muon(), strategy=strategy) for _ in range(2)]
    for engine in engines:
        for step in range(3):
            step_of(engine, place, step)
    before = bits(engines[0])
    step_of(engines[0], place, 3, weight=lambda index: float("nan") if index == 3 else 1.0)
    assert engines[0].result.skipped == 1
    after = bits(engines[0])
    for engine in engines:
        step_of(engine, place, 4)
    last = [bits(engine) for engine in engines]
    for engine in engines:
        engine.close()
    return equal(before, after) and equal(*last) and not equal(after, last[0])


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_on_one_rank_changes_no_bit(strategy: str, cluster: Cluster) -> None:
    assert all(cluster.run(2, skipped, strategy))


@iterating_in_bf16()
def resumed(place: Place, folder: str, first: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Four steps from and to a folder, and the state before them."""
    module = net()
    engine = sharded(place, module, muon(), **options)
    if first:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{first}")
        engine.load_state_dict(state)
    losses = [step_of(engine, place, step)[0] for step in range(first, first + 4)]
    state = engine.state_dict()
    dcp.save(state, checkpoint_id=f"{folder}/{first + 4}")
    engine.close()
    return losses, state


@iterating_in_bf16()
def test_ranks_take_over_each_others_state(tmp_path: Any, cluster: Cluster) -> None:
    twin = Twin(net())
    expected = [twin.step(step)[0] for step in range(12)]
    losses = cluster.run(2, resumed, str(tmp_path), 0, {})[0][0]
    losses += cluster.run(4, resumed, str(tmp_path), 4, {"strategy": "optim", "shard_size": 2})[0][0]
    more, state = resumed(SINGLE, str(tmp_path), 8, {})
    assert losses + more == pytest.approx(expected, abs=1e-9)
    # What is in it are torch's own names: its optimizers load it.
    names = dict(net().named_parameters())
    for optimizer, by_muon in ((twin.muon, True), (twin.adamw, False)):
        groups = [group for group in state["optimizer"]["param_groups"] if ("momentum" in group) is by_muon]
        assert all(set(group) >= set(optimizer.param_groups[0]) - {"initial_lr"} for group in groups)
        for group in groups:
            fresh = type(optimizer)([names[name] for name in group["params"]])
            numbers = dict(enumerate(group["params"]))
            own = {number: state["optimizer"]["state"][name] for number, name in numbers.items()}
            fresh.load_state_dict({"state": own, "param_groups": [{**group, "params": list(numbers)}]})
            assert fresh.param_groups[0]["lr"] == LR
            for number, name in numbers.items():
                for what, value in own[number].items():
                    assert torch.equal(fresh.state[names[name]][what], value), (name, what)


def test_torchs_state_is_loaded() -> None:
    module, twin = net(), Twin(net())
    for step in range(3):
        twin.step(step)
    names = {id(parameter): name for name, parameter in twin.module.named_parameters()}
    names |= {id(matrix): names[id(parameter)] for parameter, matrix in twin.flat}
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in (twin.muon, twin.adamw):
        for group in optimizer.param_groups:
            state["param_groups"].append({**group, "params": [names[id(p)] for p in group["params"]]})
        state["state"] |= {names[id(p)]: dict(own) for p, own in optimizer.state.items()}
    engine = sharded(SINGLE, module, muon(momentum=0.5))
    engine.load_state_dict({"model": twin.module.state_dict(), "optimizer": state})
    assert engine.param_groups[0]["momentum"] == 0.95
    with iterating_in_bf16():
        for step in range(3, 6):
            assert step_of(engine, SINGLE, step) == pytest.approx(twin.step(step), abs=1e-9)
    engine.close()
    # None is torch's word for "original".
    twin.muon.param_groups[0]["adjust_lr_fn"] = None
    state["param_groups"][0]["adjust_lr_fn"] = None
    engine = sharded(SINGLE, net(), muon())
    engine.load_state_dict({"optimizer": state})
    assert engine.param_groups[0]["adjust_lr_fn"] == "original"
    state["param_groups"][0]["ns_coefficients"] = (3.0, -4.0, 2.0)
    with pytest.raises(CheckpointError, match=r"ns_coefficients=\(3.0, -4.0, 2.0\)"):
        engine.load_state_dict({"optimizer": state})
    engine.close()


def freezes(module: nn.Module, step: int) -> None:
    """One block after the other, and all at the end."""
    assert isinstance(module, Net)
    for number, block in enumerate(module.blocks):
        block.requires_grad_(step >= 9 or number != step // 3)


@iterating_in_bf16()
def frozen(place: Place, options: dict[str, Any]) -> float:
    """The largest difference of losses and norms from the twin, blocks of which are frozen between steps."""
    groups = [ml.group(f"blocks.{number}.*.{leaf}", weight_decay=decay) for number in range(3) for leaf, decay in (("weight", None), ("bias", None))]
    groups += [ml.group(f"blocks.{number}.mix") for number in range(3)]
    module, twin = net(), Twin(net())
    engine = sharded(place, module, muon(groups=groups), **options)
    differences = []
    for step in range(12):
        freezes(module, step)
        freezes(twin.module, step)
        found, expected = step_of(engine, place, step), twin.step(step)
        differences += [abs(one - other) for one, other in zip(found, expected, strict=True)]
    engine.close()
    return max(differences)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"strategy": "no_shard"}, {}, {"strategy": "optim"}], ids=str)
def test_what_is_frozen_between_steps_stays(options: dict[str, Any], cluster: Cluster) -> None:
    assert max(cluster.run(2, frozen, options)) < 1e-9


@iterating_in_bf16()
def unused(place: Place, strategy: str) -> float:
    """The largest difference from a twin whose unused parameters have gradients of zero."""
    module, twin = net(), Twin(net())
    engine = sharded(place, module, muon(), strategy=strategy, find_unused=True, static_order=False)
    differences = []
    for step in range(9):
        module.without = twin.module.without = step % 4 if step % 4 < 3 else None
        for parameter in twin.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        found, expected = step_of(engine, place, step), twin.step(step)
        differences += [abs(one - other) for one, other in zip(found, expected, strict=True)]
    engine.close()
    return max(differences)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_unit_that_is_left_out_has_no_gradient(strategy: str, cluster: Cluster) -> None:
    assert max(cluster.run(2, unused, strategy)) < 1e-9


def handed_over(module: Net, **changes: Any) -> list[torch.optim.Optimizer]:
    """Torch's Muon and AdamW, as a script has them; the head is among the matrices here."""
    names = {name: p for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name and "table" not in name}
    rest = [p for name, p in module.named_parameters() if name not in names]
    return [torch.optim.Muon(names.values(), **{"lr": 2e-2, **changes}), torch.optim.AdamW(rest, lr=1e-3, betas=BETAS)]


@iterating_in_bf16()
def translated(place: Place) -> float:
    """The largest difference from torch's two optimizers on the whole model, with a scheduler."""
    module, plain = net(), net()
    given, own = handed_over(module), handed_over(plain)
    engine = sharded(place, module, given)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (engine.optimizer, *own)]
    differences = []
    for step in range(STEPS):
        found = step_of(engine, place, step)
        loss = torch.stack([plain(part(step, index)) / 4 for index in range(4)]).sum()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        scale = ((norm + 1e-6) / CLIP).clamp(min=1.0).to(torch.float32)
        for parameter in plain.parameters():
            parameter.grad /= scale
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        differences += [abs(found[0] - loss.item()), abs(found[1] - norm.item())]
    for old in given:
        with pytest.raises(ConfigError, match="the engine, which has an optimizer of its own"):
            old.step()
    with engine.gathered(modify=True):
        differences.append(distance(module, plain))
    engine.close()
    return max(differences)


def test_torchs_muon_and_adamw_are_taken_over(cluster: Cluster) -> None:
    assert max(cluster.run(2, translated)) < 1e-9


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))


def test_torchs_muon_alone_may_have_all() -> None:
    module, plain = linear(), linear()
    plain.load_state_dict(module.state_dict())
    own = torch.optim.Muon(plain.parameters(), lr=0.1)
    with iterating_in_bf16(), ml.shard(module, units=[nn.Linear], optimizer=torch.optim.Muon(module.parameters(), lr=0.1)) as engine:
        for step in range(5):
            for each in (module, plain):
                each(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            engine.step()
            own.step()
            own.zero_grad()
        with engine.gathered():
            assert all(torch.equal(one, other) for one, other in zip(module.parameters(), plain.parameters(), strict=True))


REFUSED: list[tuple[Callable[[Net], Any], dict[str, Any], str]] = [
    (lambda module: muon(momentum=1.0), {}, "got momentum=1.0, expected a number from 0 and below 1"),
    (lambda module: muon(ns_steps=2.5), {}, "got ns_steps=2.5, expected a whole number from 0 to 99"),
    (lambda module: muon(adjust_lr_fn="muP"), {}, "got adjust_lr_fn='muP', expected one of original, match_rms_adamw"),
    (lambda module: muon(adamw_lr=-1.0), {}, "got lr=-1.0"),
    (lambda module: ml.group("*", kind="sgd"), {}, "got kind='sgd'"),
    (lambda module: ml.AdamW(groups=[ml.group("*", kind="muon")]), {}, "got kind='muon' with ml.AdamW, expected it with ml.Muon alone"),
    (lambda module: muon(groups=[ml.group("*.bias", kind="muon")]), {}, 'got kind="muon" for blocks.0.conv.bias'),
    (lambda module: muon(groups=[ml.group("*", kind="adamw")]), {}, "got no trainable matrix inside of units"),
    (lambda module: muon(), {"optimizer_offload": "exact"}, "got exact with ml.Muon"),
    (lambda module: muon(), {"optimizer_offload": "zenflow"}, "got zenflow with ml.Muon"),
    (lambda module: muon(exp_avg_dtype="8bit"), {}, "got torch.float64 with ml.Muon with moments in 8bit"),
    (lambda module: handed_over(module, ns_coefficients=(3.0, -4.0, 2.0)), {}, r"got ns_coefficients=\(3.0, -4.0, 2.0\)"),
    (lambda module: handed_over(module, eps=1e-6), {}, "got eps=1e-06, expected 1e-07, which alone the engine has"),
    (lambda module: handed_over(module)[:1], {}, "embed.weight: got a trainable parameter in no group"),
    (lambda module: handed_over(module)[0], {}, "embed.weight: got a trainable parameter in no group"),
    (lambda module: [*handed_over(module), torch.optim.AdamW([module.head.weight])], {}, "got 1 parameter of another optimizer"),
    (lambda module: handed_over(module)[1:], {}, "got several: torch.optim.AdamW, expected one optimizer"),
    (lambda module: [], {}, "got several: none"),
    (lambda module: [handed_over(module)[0], torch.optim.SGD(module.parameters())], {}, "got several: torch.optim.Muon, torch.optim.SGD"),
    (lambda module: ml.elementwise(handed_over(module)[0]), {}, "orthogonalises whole matrices"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_it_is_not_is_refused(make: Callable[[Net], Any], options: dict[str, Any], message: str) -> None:
    module = net()
    with pytest.raises(ConfigError, match=message):
        sharded(SINGLE, module, make(module), **options)


def test_options_that_it_does_not_have_are_refused_between_steps() -> None:
    engine = sharded(SINGLE, net(), muon())
    # Muon's groups have momentum and AdamW's have betas: a scheduler that wants one of both for all would change a part.
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=10)
    for option, value in (("momentum", 1.0), ("ns_coefficients", (3.0, -4.0, 2.0)), ("weight_decay", float("nan"))):
        before = engine.param_groups[0][option]
        engine.param_groups[0][option] = value
        engine.model(part(0, 0)).backward()
        for _ in range(3):
            engine.model(part(0, 0)).backward()
        with pytest.raises(ConfigError, match=f"param_groups.0.: got {option}="):
            engine.step()
        engine.discard()
        engine.param_groups[0][option] = before
    engine.close()
