"""nn.Linear of users' models in FP8: which layers, what they compute, when codes of weights are made, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.shard.fp8 import FP8Layers, FP8Linears
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import modules
from megatron_llama.model.nn.fp8.codes import both_orders
from megatron_llama.model.nn.fp8.layers import Blockwise, WeightCodes
from megatron_llama.model.nn.fp8.tensorwise import tensorwise_products
from megatron_llama.model.nn.linear import ColumnLinear
from megatron_llama.model.nn.overlap import LayerProducts
from megatron_llama.model.plan.fp8 import code_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests import torch_twin
from tests.engine.shard.twins import Twin, llama, text
from tests.harness import Cluster
from tests.model.nn.fp8.numbers import normal
from tests.model.nn.fp8.test_layers import same
from tests.model.nn.handle import Handle
from tests.model.nn.spmd import tensor_mesh

RECIPES = ("blockwise", "tensorwise")
WIDTH, INNER, WORDS = 128, 256, 64
LR, CLIP, STEPS, PARTS = 3e-3, 0.5, 5, 4
QUIET = ("embed", "blocks.*.gate", "head")
"""What else has a matrix."""


class Block(nn.Module):
    """A residual block with a layer of other sizes."""

    def __init__(self, inner: int = INNER, way: str = "plain") -> None:
        super().__init__()
        self.way = way
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "plain":
            return self._computed(x)
        return checkpoint(self._computed, x, use_reentrant=self.way == "reentrant")

    def _computed(self, x: Tensor) -> Tensor:
        # In place, as many users have it.
        hidden = F.relu(self.up(self.norm(x)), inplace=True)
        return x + self.down(hidden) * self.gate(x).mean(-1, keepdim=True).sigmoid()


class Net(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, inner: tuple[int, ...] = (INNER, INNER, INNER), way: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(each, way) for each in inner)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(*inner: int, way: str = "plain") -> Net:
    torch.manual_seed(3)
    return Net(inner or (INNER, INNER, INNER), way)


def words(number: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(number))}


def next_word(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    ids = inputs["ids"]
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def hf_llama() -> nn.Module:
    """Keys of two heads: all widths are whole tiles."""
    torch.manual_seed(3)
    return llama(hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=2, num_key_value_heads=2)


TWINS = {
    "net": Twin(net, lambda positions: words(positions.start % PARTS), (Block,), next_word),
    "llama": Twin(hf_llama, text, (LlamaDecoderLayer,)),
}


@dataclass(frozen=True)
class Trained:
    """Of each step: the mean loss of all ranks, and the norm."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: Mapping[str, Tensor]

    def distance(self, other: Trained) -> tuple[float, float]:
        """Largest relative differences."""
        pairs = ((self.losses, other.losses), (self.norms, other.norms))
        return tuple(max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs)  # type: ignore[return-value]

    def same_bits(self, other: Trained) -> bool:
        alike = all(torch.equal(value, other.state[name]) for name, value in self.state.items())
        return alike and self.losses == other.losses and self.norms == other.norms


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def engine_of(model: nn.Module, units: tuple[type[nn.Module], ...] = (Block,), **options: Any) -> ml.ModuleEngine:
    given = {"fp8": "blockwise", "dtype": torch.bfloat16, "optimizer": ml.AdamW(lr=LR), "clip": CLIP} | options
    with no_warnings():
        return ml.shard(model, units=units, **given)


def steps_of(engine: ml.ModuleEngine, twin: Twin, first: int = 0, steps: int = STEPS, parts: int = PARTS) -> tuple[list[float], list[float]]:
    """Train: the parts of a step are shared out over the ranks."""
    losses, norms, world = [], [], engine.mesh.dp.size
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(engine.mesh.dp.rank, parts, world):
            loss = twin.loss(engine.model, twin.inputs(range(step * parts + part, step * parts + part + 1)))
            (loss * world / parts).backward()
            total += loss.detach() / parts
        norms.append(engine.step().grad_norm.item())
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses, norms


def train(place: Place, name: str, options: Mapping[str, Any]) -> Trained:
    twin = TWINS[name]
    engine = engine_of(twin.build(), twin.units, microbatches=PARTS // place.world_size, **options)
    with engine:
        losses, norms = steps_of(engine, twin)
        with engine.gathered():
            state = {key: value.detach().clone() for key, value in engine.model.state_dict().items()}
    return Trained(tuple(losses), tuple(norms), state)


def train_exactly(name: str) -> Trained:
    """With torch alone, in fp64."""
    twin = TWINS[name]
    model = twin.build().double()

    def losses_of(step: int) -> Iterator[Tensor]:
        for part in range(PARTS):
            yield twin.loss(model, twin.inputs(range(step * PARTS + part, step * PARTS + part + 1))) / PARTS

    optimizer = torch.optim.AdamW(torch_twin.by_decay(model.parameters(), ml.AdamW().weight_decay), lr=LR)
    losses, norms = torch_twin.train(model, optimizer, losses_of, STEPS, CLIP)
    return Trained(tuple(torch.tensor(losses).view(STEPS, PARTS).sum(1).tolist()), tuple(norms), {})


Alone = Callable[[str, str], tuple[Trained, tuple[float, float]]]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """One process in FP8, and the bounds of losses and norms: twice what it differs from fp64 by."""

    @cache
    def look_up(name: str, recipe: str) -> tuple[Trained, tuple[float, float]]:
        one = train(Place(0, 1, 0), name, {"fp8": recipe})
        loss, norm = one.distance(train_exactly(name))
        return one, (2 * loss, 2 * norm)

    return look_up


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_that_of_the_trainer_to_the_bit(recipe: str, bias: bool) -> None:
    """Output, gradient of the input, and that of the weight."""
    mesh = tensor_mesh(Place(0, 1, 0))
    trainers = LayerProducts(products=Blockwise()) if recipe == "blockwise" else tensorwise_products(mesh, gathers_codes=False)
    theirs = ColumnLinear(WIDTH, INNER, tp=mesh.tp, sequence_parallel=False, bias=bias, products=trainers["products"])
    ours = nn.Linear(WIDTH, INNER, bias=bias)
    found = []
    for layer in (ours, theirs):
        layer.weight = nn.Parameter(normal(INNER, WIDTH, seed=1))
        if bias:
            layer.bias = nn.Parameter(normal(1, INNER, seed=2)[0])
        handles = [Handle(parameter) for parameter in layer.parameters()]
        for handle in handles:
            handle.grad = handle.grad.float()  # as in the engine
    FP8Linears(ours, {ours: "layer"}, getattr(modules, recipe)().products())
    for layer in (ours, theirs):
        x = normal(6, 4, WIDTH, seed=3).requires_grad_()
        out = layer(x)
        out.backward(normal(6, 4, INNER, seed=4))
        found.append((out.detach(), x.grad, param_handle_of(layer.weight).grad))  # type: ignore[union-attr]
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], F.linear(normal(6, 4, WIDTH, seed=3), ours.weight, ours.bias))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize(("name", "ranks"), [("net", 2), ("net", 4), ("llama", 2)])
@pytest.mark.few(2, all=6)
def test_ranks_train_what_one_process_trains(cluster: Cluster, alone: Alone, name: str, ranks: int, strategy: str) -> None:
    """By the rule of docs/numerics.md."""
    one, (loss_bound, norm_bound) = alone(name, "blockwise")
    for found in cluster.run(ranks, train, name, {"strategy": strategy}):
        loss, norm = found.distance(one)
        assert loss <= loss_bound and norm <= norm_bound, (loss, loss_bound, norm, norm_bound)


def test_with_one_scale_a_tensor_a_rank_has_that_of_its_microbatch(cluster: Cluster, alone: Alone) -> None:
    """As one process that trains the microbatches one by one."""
    one, (loss_bound, norm_bound) = alone("net", "tensorwise")
    for found in cluster.run(2, train, "net", {"fp8": "tensorwise"}):
        loss, norm = found.distance(one)
        assert loss <= loss_bound and norm <= norm_bound, (loss, loss_bound, norm, norm_bound)


class Stale(Blockwise):
    """Keeps the codes of the first version of each weight."""

    def codes(self, weight: Tensor) -> WeightCodes:
        place = weight.untyped_storage()._cdata, weight.storage_offset()
        return self._kept[place] if place in self._kept else super().codes(weight)


def train_with_stale_codes(place: Place) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "Blockwise", Stale)
        return train(place, "net", {"strategy": "optim"})


def test_codes_of_the_step_before_exceed_the_bounds_by_far(cluster: Cluster, alone: Alone) -> None:
    one, (loss_bound, norm_bound) = alone("net", "blockwise")
    loss, norm = cluster.run(2, train_with_stale_codes)[0].distance(one)
    assert loss > 10 * loss_bound and norm > 5 * norm_bound, (loss, loss_bound, norm, norm_bound)


class Comparing(Blockwise):
    """Compares the codes that it has kept with those of the weight as it is, whenever they are read."""

    made: list[tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def encoded(self, weight: Tensor) -> Any:
        self.made.append(tuple(weight.shape))
        return super().encoded(weight)

    def codes(self, weight: Tensor) -> WeightCodes:
        found = super().codes(weight)
        for kept, fresh in zip(found[1:], both_orders(weight), strict=True):
            assert same(kept, fresh), "codes of another weight, or of another version"
        return found

    @property
    def kept_bytes(self) -> int:
        """Of all codes and scales that are kept."""
        return sum(part.nbytes for codes in self._kept.values() for order in codes[1:] for part in order)


@contextmanager
def comparing() -> Iterator[Comparing]:
    products = Comparing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "Blockwise", lambda: products)
        yield products


def changed_by_everything(place: Place, options: Mapping[str, Any]) -> list[int]:
    """How many weights have codes made: in the first step, in an evaluation behind the second, in the third step, and then behind each way in
    which values come from outside."""
    twin, counts = TWINS["net"], []
    model = net()
    with comparing() as products, engine_of(model, microbatches=PARTS // place.world_size, **options) as engine:

        def counted(what: Callable[[], object]) -> None:
            before = len(products.made)
            what()
            counts.append(len(products.made) - before)

        def evaluate() -> None:
            with torch.no_grad():
                twin.loss(model, words(9))

        counted(partial(steps_of, engine, twin, 0, 1))
        steps_of(engine, twin, 1, 1)
        counted(evaluate)
        counted(partial(steps_of, engine, twin, 2, 1))
        evaluate()
        state = engine.state_dict()
        with engine.gathered(modify=True):
            model.blocks[0].up.weight.mul_(1.5)
        counted(evaluate)
        with engine.masters(modify=True) as masters:
            for piece in masters.values():
                piece.values.mul_(1.25)
        counted(evaluate)
        engine.load_state_dict(state)
        counted(evaluate)
        model.blocks[1].up.requires_grad_(False)
        steps_of(engine, twin, 3, 1)
        twin.loss(model, words(9))
        engine.discard()
        steps_of(engine, twin, 4, 1)
    return counts


KEPT: dict[str, Mapping[str, Any]] = {
    "no shard": {"strategy": "no_shard"},
    "optim": {"strategy": "optim"},
    "params": {"strategy": "optim_grads_params", "param_slots": "all"},
    "schedule-free": {"strategy": "optim_grads", "optimizer": ml.ScheduleFreeAdamW(lr=LR)},
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.few(2, all=4)
def test_codes_are_made_once_for_each_version_of_a_weight(cluster: Cluster, kind: str) -> None:
    """Whatever changes it, and they are never those of another version."""
    for counts in cluster.run(2, changed_by_everything, KEPT[kind]):
        first, evaluated, third, *outside = counts
        assert first == 6 and all(1 <= made <= 6 for made in outside)
        # An evaluation reads the weights that the next step begins with, but for averages.
        assert (evaluated, third) == ((6, 6) if kind == "schedule-free" else (6, 0))


def bytes_kept(place: Place, slots: int) -> int:
    """Units of four sizes take turns in slots."""
    model = net(512, 256, 640, 384, 512, 256, 640, 384)
    with comparing() as products, engine_of(model, microbatches=PARTS // place.world_size, param_slots=slots) as engine:
        steps_of(engine, TWINS["net"], steps=2)
        return products.kept_bytes


def test_codes_end_with_the_gathered_weights(cluster: Cluster) -> None:
    """Codes of as many units as there are slots, however unlike the units are."""
    largest = code_bytes(640, WIDTH) + code_bytes(WIDTH, 640)
    for slots in (2, 3):
        assert all(0 < kept <= slots * largest for kept in cluster.run(2, bytes_kept, slots))


@pytest.mark.few(2, all=4)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_blocks_have_the_same_bits(way: str, recipe: str) -> None:
    found = []
    for each in ("plain", way):
        with engine_of(net(way=each), fp8=recipe, microbatches=PARTS) as engine:
            losses, norms = steps_of(engine, TWINS["net"])
            with engine.gathered():
                found.append(Trained(tuple(losses), tuple(norms), copy.deepcopy(engine.model.state_dict())))
    assert found[0].same_bits(found[1])


def resumed(place: Place, recipe: str) -> bool:
    """Whether a run that goes on from a state has the bits of one that was not interrupted; the state is that of a model without FP8."""
    twin, found = TWINS["net"], []
    options = {"fp8": recipe, "microbatches": PARTS // place.world_size}
    with engine_of(net(), **options) as engine, engine_of(net(), **options | {"fp8": "none"}) as plain:
        steps_of(engine, twin, 0, 2)
        state = engine.state_dict()
        plain.load_state_dict(state)
        assert plain.state_dict()["model"].keys() == state["model"].keys() == net().state_dict().keys()
        with engine_of(net(), **options) as other:
            other.load_state_dict(state)
            for each in (engine, other):
                losses, norms = steps_of(each, twin, 2, 2)
                with each.gathered():
                    values = {name: value.detach().clone() for name, value in each.model.state_dict().items()}
                found.append(Trained(tuple(losses), tuple(norms), values))
    return found[0].same_bits(found[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_goes_on_with_the_same_bits(cluster: Cluster, recipe: str) -> None:
    assert cluster.run(2, resumed, recipe) == [True, True]


def test_evaluations_and_frozen_layers_are_in_fp8_too() -> None:
    """And what is called inside of ``gathered`` is the plain model."""
    model, ids = net(), words(1)["ids"]
    model.blocks[1].requires_grad_(False)
    with engine_of(model) as engine:
        trained = model(ids).detach()
        engine.discard()
        with torch.no_grad():
            assert torch.equal(model(ids), trained)
        with engine.gathered():
            plain = copy.deepcopy(model)
        assert not torch.equal(plain(ids), trained)
        assert [type(layer) for layer in plain.modules()] == [type(layer) for layer in net().modules()]
    with engine_of(net(), fp8="none") as engine, torch.no_grad():
        assert torch.equal(engine.model(ids), plain(ids))


def warned(model: nn.Module, **options: Any) -> list[str]:
    """What ``shard`` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ml.shard(model, **{"units": (Block,), "dtype": torch.bfloat16, "fp8": "blockwise"} | options):
            return [str(warning.message) for warning in caught]


class Adapter(nn.Module):
    """As peft has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a, self.lora_b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, base.out_features, bias=False)


def test_everything_else_with_a_matrix_is_named() -> None:
    model = net()
    odd = model.blocks[2]
    odd.conv, odd.attention, odd.own = nn.Conv1d(WIDTH, WIDTH, 1), nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
    odd.own.forward = odd.own.forward
    odd.bilinear, odd.table, odd.left = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    odd.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    odd.up, odd.encoder = Adapter(odd.up), nn.TransformerEncoderLayer(WIDTH, 2, WIDTH)
    odd.router = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    units = [Block, ml.unit(nn.Sequential, dtype=torch.float32)]
    others, emulated = warned(model, units=units, ignored=["blocks.2.table.*"], fp8_except=["*.left"])[-2:]
    assert "slower than bf16" in emulated
    got = others.removeprefix("shard(fp8='blockwise'): got what stays as it is: ").partition(", expected to be told: 6 nn.Linear")[0]
    assert dict(part.split(": ") for part in got.split("; ")) == {
        "Embedding": "embed",
        "inputs or outputs no multiples of 128": "blocks.*.gate (3)",
        "Conv1d": "blocks.2.conv",
        "MultiheadAttention": "blocks.2.attention, blocks.2.encoder.self_attn",
        "NonDynamicallyQuantizableLinear": "blocks.2.attention.out_proj, blocks.2.encoder.self_attn.out_proj",
        "a replaced forward": "blocks.2.own",
        "Bilinear": "blocks.2.bilinear",
        "ignored": "blocks.2.table",
        "ParametrizationList": "blocks.2.normed.parametrizations.weight",
        "an adapter": "blocks.2.up.lora_a, blocks.2.up.lora_b",
        "read past the layer in evaluation, by nn.TransformerEncoderLayer": "blocks.2.encoder.linear1, blocks.2.encoder.linear2",
        "in torch.float32": "blocks.2.router.0",
        "outside of units": "head",
    }


@pytest.mark.parametrize("excepted", [QUIET, [*QUIET, "blocks.0"], lambda model: [model.embed, model.head, *(block.gate for block in model.blocks)]])
def test_what_the_user_names_is_no_surprise(excepted: Any) -> None:
    model = net()
    [emulated] = warned(model, fp8_except=excepted(model) if callable(excepted) else excepted)
    assert emulated.startswith("shard(fp8='blockwise') on a CPU is emulated")
    assert warned(net(), fp8="none") == []


def test_a_module_stays_with_all_in_it() -> None:
    ids = words(1)["ids"]
    outputs = []
    for options in ({"fp8_except": "blocks.[12]"}, {"fp8_except": ["blocks.1.*", "blocks.2.*"]}, {}):
        with engine_of(net(), **options) as engine, torch.no_grad():
            outputs.append(engine.model(ids))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def tensor_parallel(place: Place) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    return warned(model, mesh=mesh["dp"])


def test_layers_that_tensor_parallelism_has_cut_stay(cluster: Cluster) -> None:
    assert any("a part of a DTensor: blocks.*.up (3)" in text for text in cluster.run(2, tensor_parallel)[0])


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "another recipe": ({"fp8": "delayed"}, "one of none, blockwise, tensorwise"),
    "no bf16": ({"dtype": torch.float32}, "no layer to multiply so: .*in torch.float32: .*up"),
    "no units": ({"units": ()}, "outside of units: .*up"),
    "all excepted": ({"fp8_except": "*"}, "in fp8_except"),
    "no such module": ({"fp8_except": ["lm_head"]}, "'lm_head', which is no module of the model"),
    "another module": ({"fp8_except": nn.Linear(1, 1)}, "no module of the model"),
    "no fp8": ({"fp8": "none", "fp8_except": "head"}, "got no fp8, expected fp8 as well"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    options, said = REFUSED[name]
    model = net()
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=said):
        engine_of(model, **options)
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
    with pytest.raises(TypeError, match="fp8_except"):
        engine_of(model, fp8_except=[3])


def other_exceptions(place: Place) -> None:
    engine_of(net(), fp8_except=f"blocks.{place.rank}")


def test_ranks_leave_out_the_same(cluster: Cluster) -> None:
    with pytest.raises(Exception, match=r"fp8_except: got \['blocks.1'\] on rank 1"):
        cluster.run(2, other_exceptions)


def test_a_device_that_cannot_multiply_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "capability", lambda device: (8, 0))
    monkeypatch.setattr(devices, "name", lambda device: "an old one")
    for recipe in RECIPES:
        with pytest.raises(ConfigError, match=f"fp8='{recipe}': got an old one, .*; leave fp8='{recipe}' out"):
            FP8Layers(net(), recipe, ()).require_device(torch.device("cuda"))


@contextmanager
def one_layer() -> Iterator[nn.Module]:
    """A unit that is a layer, and gives whatever it gets to it."""
    layer = nn.Linear(WIDTH, WIDTH)
    with engine_of(nn.Sequential(layer), (nn.Linear,), microbatches=2) as engine:
        yield engine.model


class Marked(Tensor):
    """A subclass."""


def traced(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x)  # type: ignore[no-any-return]


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


def differentiated_twice(model: nn.Module, x: Tensor) -> Tensor:
    [slope] = torch.autograd.grad(model(x.requires_grad_()).float().square().sum(), x, create_graph=True)
    return slope


def with_another_weight(model: nn.Module, x: Tensor) -> Tensor:
    layer, own = model[0], []  # type: ignore[index]

    def replace(module: nn.Module, args: object) -> None:
        own.append(module.weight)
        module._parameters["weight"] = nn.Parameter(module.weight.detach() * 2)

    layer.register_forward_pre_hook(replace)
    layer.register_forward_hook(lambda *_: layer._parameters.update(weight=own.pop()), always_call=True)
    return model(x)  # type: ignore[no-any-return]


STRANGE: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "a subclass": (lambda model, x: model(x.as_subclass(Marked)), "got a Marked"),
    "torch.func": (traced, "under torch.func"),
    "autocast": (under_autocast, "under torch.autocast"),
    "twice": (differentiated_twice, "create_graph=True"),
    "another weight": (with_another_weight, "another tensor in the place of its weight"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_layer_never_falls_back_to_bf16(name: str) -> None:
    call, said = STRANGE[name]
    with one_layer() as model, pytest.raises(TrainingError, match=said):
        call(model, normal(4, WIDTH, seed=1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(WIDTH,), (0, WIDTH), (2, 0, WIDTH), (3, 2, 5, WIDTH)])
def test_inputs_of_any_shape(recipe: str, shape: tuple[int, ...]) -> None:
    """An expert may get no token."""
    with engine_of(nn.Sequential(nn.Linear(WIDTH, INNER)), (nn.Linear,), fp8=recipe) as engine:
        x = normal(*shape, seed=1).requires_grad_()
        out = engine.model(x)
        assert out.shape == (*shape[:-1], INNER) and out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert x.grad.shape == shape and x.grad.isfinite().all() and engine.step().skipped == 0


def test_layouts_in_memory_change_no_bit() -> None:
    """Of inputs and of gradients: transposed, and one number for all."""
    with one_layer() as model:
        found = []
        for x in (normal(WIDTH, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=1).t().contiguous().t()):
            x.requires_grad_()
            model(x).sum().backward()
            found.append(x.grad)
    assert torch.equal(*found)


class Reader(Block):
    """Reads the weight of a layer itself."""

    def _computed(self, x: Tensor) -> Tensor:
        return x + self.down(F.linear(self.norm(x), self.up.weight, self.up.bias)) * self.gate(x).mean(-1, keepdim=True)


def test_layers_whose_weights_are_read_past_them_are_named() -> None:
    model = net()
    model.blocks[1] = Reader()
    with engine_of(model, microbatches=PARTS) as engine:
        with pytest.warns(UserWarning, match="shard\\(fp8=\\): blocks.1.up: got no call in the first step"):
            steps_of(engine, TWINS["net"], 0, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps_of(engine, TWINS["net"], 1, 1)


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compilers_see_what_is_around_the_layers(before: bool) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = net()
        if compiled and before:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        with engine_of(model, microbatches=PARTS) as engine:
            if compiled and not before:
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            losses, norms = steps_of(engine, TWINS["net"], steps=2)
        found.append((losses, norms))
    assert found[0] == found[1]


def test_the_base_of_a_low_rank_addition_is_in_fp8() -> None:
    """peft's own layers: codes of the frozen weights are made once in a run, and the factors stay."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(hf_llama(), LoraConfig(r=WIDTH, target_modules=["up_proj"]))
    twin = TWINS["llama"]
    with comparing() as products, engine_of(wrapped, (LlamaDecoderLayer,), strategy="optim", microbatches=PARTS) as engine:
        steps_of(engine, twin, steps=2)
        first = len(products.made)
        steps_of(engine, twin, 2, 1)
    # Of each of four layers: four matrices of attention, three of the MLP.
    assert first == len(products.made) == 4 * 7
    model = get_peft_model(hf_llama(), LoraConfig(r=WIDTH, target_modules=["up_proj"]))
    others = warned(model, units=(LlamaDecoderLayer,))[-2]
    assert "an adapter: base_model.model.model.layers.*.mlp.up_proj.lora_A.default (4)" in others
