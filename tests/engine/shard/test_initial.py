"""First values, and parameters that are whole between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.shard.gathered import gathered
from megatron_llama.engine.shard.initial import require_same_model
from megatron_llama.engine.shard.initialize import initialize
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from torch import Tensor, nn

from tests.engine.shard.engines import STRATEGIES, Block, Model, Sharded, batch, model, sharded
from tests.harness import Cluster

SINGLE = Place(0, 1, 0)


def blocks(module: Model) -> list[nn.Module]:
    return list(module.blocks)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of everything, buffers that are not saved too."""
    return {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def whole(run: Sharded) -> dict[str, Tensor]:
    with gathered(run.values):
        return state(run.model)


def rank0_counts(place: Place, strategy: str, kind: str, shard_size: int) -> bool:
    module = model(seed=0 if place.rank == 0 else 5)
    if place.rank:
        with torch.no_grad():
            module.ramp.fill_(7.0)
            module.blocks[0].calls.fill_(9)
        if kind == "meta":
            module = on_meta()
    run = sharded(place, module, strategy=strategy, units=blocks(module), shard_size=shard_size)
    assert not run.values.uninitialized
    found = same(whole(run), state(model()))
    assert all(parameter.is_meta for parameter in module.parameters())  # the placeholders are back
    assert module.head.weight is module.embed.weight
    run.engine.close()
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["other values", "meta"])
@pytest.mark.parametrize(("strategy", "world", "shard_size"), [*((one, 2, 0) for one in STRATEGIES), ("optim_grads_params", 4, 2)])
def test_values_of_rank_0_count(cluster: Cluster, strategy: str, world: int, shard_size: int, kind: str) -> None:
    assert cluster.run(world, rank0_counts, strategy, kind, shard_size) == [True] * world


def other_model(place: Place, change: str) -> str:
    module = model()
    if place.rank == 1:
        if change == "shape":
            module.blocks[1].back = nn.Linear(8, 10)
        if change == "name":
            module.blocks[0].extra = nn.Parameter(torch.zeros(2))
        if change == "frozen":
            module.blocks[0].scale.requires_grad_(False)
        if change == "order":
            embed = module.embed
            del module.embed
            module.embed = embed
    mesh = build_mesh(Config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    try:
        require_same_model(module, mesh.dp)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("none", ""),
        (
            "shape",
            "blocks.1.back.weight: got torch.float32 of (10, 8), trained, expected torch.float32 of (10, 7), trained; build the same",
        ),
        ("name", "blocks.0.extra: got torch.float32 of (2,), trained, expected nothing"),
        ("frozen", "blocks.0.scale: got torch.float32 of (), not trained, expected torch.float32 of (), trained"),
        ("order", "got the parameters in another order"),
    ],
)
def test_another_model_on_some_rank_is_an_error_of_all(cluster: Cluster, change: str, expected: str) -> None:
    errors = cluster.run(2, other_model, change)
    assert errors[0] == errors[1]
    assert expected in errors[0] and (expected != "") == (errors[0] != "")


def on_meta(width: int = 10) -> Model:
    with torch.device("meta"):
        return Model(width)


def by_reset(module: nn.Module) -> None:
    """As ``initialize`` does without a function, and what has no reset_parameters."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, Model):
        module.ramp.copy_(torch.arange(10.0) / 10)


def initialized(place: Place, strategy: str) -> tuple[bool, bool]:
    module = on_meta()
    run = sharded(place, module, strategy=strategy, units=blocks(module))
    assert run.values.uninitialized == {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    with pytest.raises(TrainingError, match=r"model: got no values of blocks.0.back.bias, .* and 13 others"):
        run.values.require_initialized()
    torch.manual_seed(3 if place.rank == 0 else 4)
    initialize(run.values, blocks(module), by_reset)
    run.values.require_initialized()
    single = on_meta().to_empty(device="cpu")
    single.head.weight = single.embed.weight  # to_empty has made two of them
    torch.manual_seed(3)
    single.apply(by_reset)
    found = same(whole(run), state(single))
    run.engine.close()
    return found, not any(buffer.is_meta for buffer in module.buffers())


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_initialize_is_apply_unit_by_unit_with_the_values_of_rank_0(cluster: Cluster, strategy: str) -> None:
    assert cluster.run(2, initialized, strategy) == [(True, True)] * 2


def test_only_one_unit_is_whole_at_a_time() -> None:
    module = on_meta()
    run = sharded(SINGLE, module, units=blocks(module))
    seen: list[tuple[str, set[str]]] = []
    names = {one: name for name, one in module.named_modules()}

    def note(one: nn.Module) -> None:
        by_reset(one)
        seen.append((names[one], {name.rpartition(".")[0] for name, p in module.named_parameters(remove_duplicate=False) if not p.is_meta}))

    initialize(run.values, blocks(module), note)
    modules = dict(seen)
    assert modules["blocks.0.norm"] == {f"blocks.0{part}" for part in ("", ".norm", ".conv", ".linear", ".back")} | {"blocks.1.linear"}
    assert modules["embed"] == modules["head"] == {"embed", "head"}
    assert modules[""] == set()
    assert [name for name, _ in seen][-2:] == ["head", ""]


def test_what_has_values_keeps_them() -> None:
    """Half of a model is loaded, the rest is on the meta device."""
    module = on_meta()
    module.blocks[0] = kept = Block(10)
    before = state(kept)
    run = sharded(SINGLE, module, units=blocks(module))
    assert not any(name.startswith("blocks.0") for name in run.values.uninitialized)
    initialize(run.values, blocks(module), by_reset)
    found = whole(run)
    assert same({name.removeprefix("blocks.0."): value for name, value in found.items() if name.startswith("blocks.0.")}, before)


def test_what_a_function_leaves_without_values_is_named() -> None:
    module = on_meta()
    run = sharded(SINGLE, module, units=blocks(module))
    with pytest.raises(ConfigError, match=r"engine.initialize: got no values of ramp, expected"):
        initialize(run.values, blocks(module))
    assert run.values.uninitialized == {"ramp"}
    with pytest.raises(TrainingError, match="got no values of ramp"), gathered(run.values):
        pass
    initialize(run.values, blocks(module), by_reset)
    assert not run.values.uninitialized


def test_models_of_transformers_have_values_of_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    run = sharded(SINGLE, module, units=list(module.model.layers))
    torch.manual_seed(1)
    initialize(run.values, list(module.model.layers))
    found = whole(run)
    reference = transformers.LlamaForCausalLM(config)
    assert same({n: b for n, b in found.items() if "inv_freq" in n}, {n: b for n, b in state(reference).items() if "inv_freq" in n})
    weight = found["model.layers.1.mlp.up_proj.weight"]
    assert 0.8 < float(weight.std()) / config.initializer_range < 1.2
    assert bool((found["model.norm.weight"] == 1).all())


def gathered_and_changed(place: Place, strategy: str) -> list[bool]:
    module = model()
    run = sharded(place, module, strategy=strategy, units=blocks(module), bf16=True)
    for step in range(2):
        run.step(partial(module, batch(step, place.rank)))
    with gathered(run.values, modify=True):
        before = state(module)
        assert before["embed.weight"].dtype == torch.float32
        if place.rank == 0:
            module.blocks[1].conv.weight.data.fill_(3.0)
            module.embed.weight.mul_(2.0)
            module.blocks[1].scale = nn.Parameter(torch.tensor(5.0))
            module.blocks[1].calls.fill_(11)
    with gathered(run.values, modify=True):
        after = state(module)
    expected = dict(before)
    expected["blocks.1.conv.weight"] = torch.full((10, 10, 3), 3.0)
    expected["embed.weight"] = before["embed.weight"] * 2
    expected["blocks.1.scale"] = torch.tensor(5.0)
    expected["blocks.1.calls"] = torch.tensor(11)
    with gathered(run.values):
        rounded = state(module)
    run.engine.close()
    return [same(after, expected), same(rounded, {n: v.bfloat16() if n in run.values.aliases else v for n, v in expected.items()})]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_changes_of_rank_0_are_kept_to_the_bit(cluster: Cluster, strategy: str) -> None:
    assert cluster.run(2, gathered_and_changed, strategy) == [[True, True]] * 2


def add_one(weight: Tensor) -> None:
    weight.add_(1)


def add_one_to_data(weight: Tensor) -> None:
    weight.data.add_(1)


def put_data(weight: Tensor) -> None:
    weight.data = weight.data.clone()


def changed_by_one_rank(place: Place, change: Callable[[Tensor], None], bf16: bool) -> str:
    module = model()
    run = sharded(place, module, units=blocks(module), bf16=bf16)
    try:
        with gathered(run.values):
            if place.rank == 1:
                change(module.embed.weight)
    except TrainingError as error:
        found = whole(run)["embed.weight"]
        assert torch.equal(found, model().embed.weight.to(found.dtype))
        return str(error)
    finally:
        run.engine.close()
    return ""


@pytest.mark.long
@pytest.mark.parametrize(("change", "bf16"), [(add_one, False), (add_one_to_data, False), (add_one_to_data, True), (put_data, False)])
def test_a_change_without_modify_is_an_error_of_all(change: Callable[[Tensor], None], bf16: bool, cluster: Cluster) -> None:
    errors = cluster.run(2, changed_by_one_rank, change, bf16)
    assert errors[0] == errors[1]
    assert "rank 1: engine.gathered: got a change of embed.weight, expected parameters as they were" in errors[0]


def test_another_shape_is_refused_and_an_exception_changes_nothing() -> None:
    module = model()
    run = sharded(SINGLE, module, units=blocks(module))
    with (
        pytest.raises(ConfigError, match=r"head|embed.weight: got a value of \(3,\), expected \(13, 10\)"),
        gathered(run.values, modify=True),
    ):
        module.embed.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError), gathered(run.values, modify=True):
        module.embed.weight.zero_()
        raise KeyError
    assert same(whole(run), state(model()))


def filled_by_hand(place: Place, rank0: bool) -> bool:
    module = on_meta()
    run = sharded(place, module, units=blocks(module))
    with gathered(run.values, modify=True, rank0=rank0, to="cpu"):
        if place.rank == 0:
            module.load_state_dict(model().state_dict())
    assert run.values.uninitialized == {"ramp"}
    with gathered(run.values, modify=True):
        module.ramp.copy_(model().ramp)
    found = same(whole(run), state(model()))
    run.engine.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("rank0", [False, True])
def test_parameters_on_meta_may_be_filled_by_hand(cluster: Cluster, rank0: bool) -> None:
    assert cluster.run(2, filled_by_hand, rank0) == [True, True]
