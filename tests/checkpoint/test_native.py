"""What is saved comes back bit for bit, under any layout, in this program and in others."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.chunks import CHUNK_ELEMENTS, Region
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.params import hf_shapes
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.cases import (
    SINGLE,
    TRAINED,
    Held,
    copies,
    load_into,
    load_under,
    merged,
    same,
    save_under,
    state_at,
    trained,
    whole_weights,
)
from tests.harness import Cluster
from tests.parallel.cases import Layout, trainer

ONE = Layout()


@pytest.mark.parametrize(
    "other",
    [ONE, Layout(bucket=3_000), Layout(strategy="no_shard"), Layout(strategy="optim_grads")],
    ids=["same", "buckets", "no", "grads"],
)
def test_one_process(tmp_path: Path, other: Layout) -> None:
    saved = save_under(SINGLE, ONE, tmp_path)
    found = load_under(SINGLE, other, tmp_path)
    assert same(merged(found.regions), merged(saved.regions))
    assert found.steps == saved.steps == {float(TRAINED)}
    # With other buckets the gradient norm is summed in another order.
    bound = 1e-6 if other.bucket != ONE.bucket else 0
    assert [loss for loss, _ in found.later] == pytest.approx([loss for loss, _ in saved.later], rel=bound)


SAVED = (
    ONE,
    Layout(tp=2, dp=2, sp=True, bucket=7_000),
    Layout(pp=2, dp=2, virtual=2, split=(0, 2, 2, 0), schedule="interleaved", microbatches=2, strategy="optim_grads", bucket=5_000),
    Layout(cp=2, dp=2, strategy="optim_grads_params"),
    Layout(tp=4, pp=2, schedule="zb-v", virtual=2, microbatches=2),
    Layout(dp=4, strategy="optim_grads_params", shard_size=2, slots="3", grad_slots=1),
)
LOADED = (
    Layout(strategy="no_shard", bucket=3_000),
    Layout(tp=4, sp=True, microbatches=2),
    Layout(pp=4, schedule="zb-h1", microbatches=4),
    Layout(tp=2, cp=2, cp_comm="ring", dp=2, strategy="optim_grads"),
    Layout(pp=2, split=(3, 1), dp=2, strategy="optim_grads_params", slots="all"),
    Layout(dp=8, strategy="no_shard"),
)
"""Six ways to save, six others to load: parallel sizes, virtual stages, context, strategies, slots, buckets, key/value heads in copies."""
LATER = 3


@dataclass(frozen=True)
class Origin:
    """A checkpoint, what it holds, and how the run that saved it went on."""

    name: str
    folder: Path
    state: dict[str, Tensor]
    later: list[tuple[float, float]]


@pytest.fixture(scope="module")
def origins(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[Origin]:
    def saved_under(layout: Layout) -> Origin:
        folder = tmp_path_factory.mktemp("saved")
        ranks = cluster.run(layout.world_size, save_under, layout, folder, LATER)
        return Origin(layout.name, folder, merged(part for rank in ranks for part in rank.regions), ranks[0].later)

    return [saved_under(layout) for layout in SAVED]


def load_each(place: Place, layout: Layout, folders: list[Path]) -> list[Held]:
    run = trainer(place, layout)
    return [load_into(run, folder, LATER) for folder in folders]


@pytest.mark.few(1, all=3)
@pytest.mark.parametrize("after", LOADED, ids=lambda layout: layout.name)
def test_saved_under_one_layout_and_loaded_under_another(
    cluster: Cluster, origins: list[Origin], after: Layout, request: pytest.FixtureRequest
) -> None:
    """Weights, moments and step counts are the same bit for bit; the steps that follow go as they would have gone.

    One engine loads several checkpoints, one after the other: nothing may stay of what it did with the one before. With --all every
    layout loads those of all; otherwise one process loads its own, and one of tensor-parallel ranks."""
    if not request.config.getoption("--all"):
        origins = [origins[(LOADED.index(after) + step) % len(origins)] for step in (0, 1)]
    loads = zip(*cluster.run(after.world_size, load_each, after, [origin.folder for origin in origins]), strict=True)
    for origin, ranks in zip(origins, loads, strict=True):
        assert same(merged(part for rank in ranks for part in rank.regions), origin.state), origin.name
        assert {step for rank in ranks for step in rank.steps} == {float(TRAINED)}, origin.name
        for rank in ranks:
            for (loss, norm), (expected_loss, expected_norm) in zip(rank.later, origin.later, strict=True):
                assert loss == pytest.approx(expected_loss, rel=1e-6), origin.name
                assert norm == pytest.approx(expected_norm, rel=2e-5), origin.name


TIED = [
    (Layout(pp=2, dp=2, strategy="optim_grads", tied=True), Layout(tp=2, sp=True, tied=True)),
    (Layout(tp=2, pp=2, sp=True, tied=True), Layout(dp=3, tied=True, bucket=5_000)),
    (Layout(tp=4, kv_heads=1, sp=True), Layout(cp=2, dp=2, kv_heads=1, strategy="optim_grads")),
    (Layout(pp=2, virtual=2, schedule="zb-v", microbatches=2, tied=True), Layout(tp=4, dp=2, tied=True, bucket=3_000)),
]


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), TIED, ids=lambda layout: layout.name)
def test_tied_weights_and_shared_heads(cluster: Cluster, tmp_path: Path, before: Layout, after: Layout) -> None:
    saved = cluster.run(before.world_size, save_under, before, tmp_path)
    found = cluster.run(after.world_size, load_under, after, tmp_path)
    state = merged(part for rank in saved for part in rank.regions)
    assert same(merged(part for rank in found for part in rank.regions), state)
    assert {step for rank in found for step in rank.steps} == {float(TRAINED)}
    weights = whole_weights(tmp_path)
    assert same(weights, {name: state[name] for name in weights})
    # The loss is known to every rank, and the published weights give the one that follows.
    expected = [loss for loss, _ in saved[0].later]
    assert all([loss for loss, _ in rank.later] in ([], pytest.approx(expected, rel=1e-6)) for rank in found)


def test_the_same_layout_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    layout = Layout(tp=2, dp=2, sp=True)
    saved = cluster.run(4, save_under, layout, tmp_path)
    found = cluster.run(4, load_under, layout, tmp_path)
    assert [rank.later for rank in found] == [rank.later for rank in saved]


def load_apart(place: Place, layout: Layout, folders: list[Path]) -> Held:
    return load_under(place, layout, folders[place.rank])


def test_all_ranks_load_what_rank_0_sees(cluster: Cluster, tmp_path: Path) -> None:
    layout = Layout(dp=2)
    saved = cluster.run(2, save_under, layout, tmp_path / "new")
    run = trainer(SINGLE, ONE)
    native.save(tmp_path / "stale", run.optimizer, run.mesh, state_at(1), ONE.config())
    found = cluster.run(2, load_apart, layout, [tmp_path / "new", tmp_path / "stale"])
    assert same(merged(part for rank in found for part in rank.regions), merged(part for rank in saved for part in rank.regions))


def test_low_precision_parameters_follow_the_loaded_masters(tmp_path: Path) -> None:
    saved = merged(save_under(SINGLE, ONE, tmp_path).regions)
    run = trainer(SINGLE, Layout(bf16=True))
    native.load(tmp_path, run.optimizer, run.mesh, ONE.config().model)
    run.optimizer.settle()
    name = "model.layers.2.self_attn.o_proj.weight"
    assert same(merged(copies(run.optimizer)), saved)
    assert torch.equal(run.stages[0].get_parameter(name), saved[name].bfloat16())


def test_weights_are_read_in_rectangles(tmp_path: Path) -> None:
    save_under(SINGLE, Layout(bucket=3_000), tmp_path)
    weights, expected = native.open_weights(tmp_path / "iter_0000002"), whole_weights(tmp_path)
    name = "model.layers.3.mlp.down_proj.weight"
    out = torch.empty(5, 17, dtype=torch.bfloat16)
    weights(Rectangle(name, (64, 160), (33, 70), (5, 17), 0), out)
    assert torch.equal(out, expected[name][33:38, 70:87].bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_tool_of_torch_reads_it(cluster: Cluster, tmp_path: Path) -> None:
    """Keys and shapes are those of the HuggingFace model, and the planner is torch's own."""
    layout = Layout(tp=2, pp=2)
    saved = cluster.run(4, save_under, layout, tmp_path)
    expected = merged(part for rank in saved for part in rank.regions)
    shapes = hf_shapes(layout.config().model)
    assert expected.keys() == {prefix + name for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.") for name in shapes}
    found: dict[str, Any] = {key: torch.full(tensor.shape, torch.nan) for key, tensor in expected.items()}
    folder = tmp_path / "iter_0000002"
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.state_dict_metadata.keys() == expected.keys()
    assert all(isinstance(place.crc32, int) for place in metadata.storage_data.values())
    dcp_load(found, checkpoint_id=folder, planner=DefaultLoadPlanner(), no_dist=True)
    assert same(found, expected)


def test_meta(tmp_path: Path) -> None:
    run = trained(SINGLE, ONE)
    config = ONE.config()
    config = replace(config, data=replace(config.data, tokenizer_model="tokenizer.model"), training=replace(config.training, seed=7))
    path = native.save(tmp_path / "new" / "folder", run.optimizer, run.mesh, state_at(12), config)
    meta = native.read_meta(tmp_path / "new" / "folder")
    assert (meta.folder, meta.state, meta.optimizer_step, meta.seed) == (path, state_at(12), TRAINED, 7)
    assert (meta.tokenizer_model, meta.torch_version) == ("tokenizer.model", torch.__version__)
    assert meta.config["optimizer"]["lr"] == config.optimizer.lr
    assert replace(meta.model, make_vocab_size_divisible_by=128) == config.model
    text = json.loads((path / "meta.json").read_text())
    assert (text["model"]["model_type"], text["format_version"]) == ("llama", 1)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoint_dir.latest(tmp_path) is None and checkpoint_dir.latest(tmp_path / "missing") is None
    run = trained(SINGLE, ONE, steps=0)
    first, second, third = (native.save(tmp_path, run.optimizer, run.mesh, state_at(i), ONE.config()) for i in (2, 10_000_000, 9))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "9\n" and checkpoint_dir.latest(tmp_path) == third
    for text, expected in (("2", first), ("5", second), ("damaged", second)):
        tracker.write_text(text)
        assert checkpoint_dir.latest(tmp_path) == expected
    tracker.unlink()
    (second / ".metadata").unlink()
    assert checkpoint_dir.latest(tmp_path) == third
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "iter_0000009", "iter_10000000"]


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    run = trainer(SINGLE, ONE)
    native.save(tmp_path, run.optimizer, run.mesh, state_at(TRAINED), ONE.config())
    saved = save_under(SINGLE, Layout(bucket=3_000), tmp_path)
    assert same(merged(load_under(SINGLE, ONE, tmp_path).regions), merged(saved.regions))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]


def test_large_tensors_are_cut_into_chunks() -> None:
    """No data is touched: an expanded scalar has the shape of LLaMA-3 70B's output head."""
    shape = (128_256, 8_192)
    part = Region("lm_head.weight", shape, (0, 0), shape, torch.zeros(()).expand(shape))
    chunks = list(part.split())
    rows = CHUNK_ELEMENTS // shape[1]
    assert [chunk.offset for chunk in chunks] == [(row, 0) for row in range(0, shape[0], rows)]
    assert sum(math.prod(chunk.size) for chunk in chunks) == math.prod(shape)
    row = Region("x", (2, 2 * CHUNK_ELEMENTS), (1, 0), (1, 2 * CHUNK_ELEMENTS), torch.zeros(()).expand(1, 2 * CHUNK_ELEMENTS))
    assert [chunk.offset for chunk in row.split()] == [(1, 0)]
