"""The table of sharding modes: what it says was sent is what was planned, in every mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import UserError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from tools.compare_sharding import OutOfMemory, built_everywhere, checked, random_batches

from tests.e2e.product import TINY, VOCAB_SIZE, Product, words
from tests.harness import Cluster
from tests.launcher import Launcher
from tests.parallel.cases import Layout

MODES = ("no_shard", "optim", "optim_grads", "optim_grads_params-2", "optim_grads_params-3", "optim_grads_params-all")
OPTIONS = {**TINY, "split": None, "micro_batch_size": 1, "vocab_size": 512, "steps": 2, "rounds": 1}


@pytest.mark.long
@pytest.mark.parametrize("freeze", [(), ("model.layers.1.*", "model.embed_tokens.*")], ids=["all trained", "some frozen"])
def test_every_mode_sends_what_was_planned(freeze: tuple[str, ...], launcher: Launcher, tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    arguments = words({**OPTIONS, "json": target, **({"freeze": freeze} if freeze else {})})
    printed = launcher.run(arguments, 2, module="tools.compare_sharding").ok().out
    rows = {row["name"]: row for row in json.loads(target.read_text())}
    assert tuple(rows) == MODES
    for name, row in rows.items():
        assert row["sent_bytes"] == row["planned_bytes"] > 0, name
        assert row["step_ms"] > row["exposed_ms"] >= 0 and row["peak_memory_bytes"] > 2**20
        assert f"\n{name} " in printed
    sent = {name: row["sent_bytes"] for name, row in rows.items()}
    assert freeze or sent["no_shard"] == pytest.approx(sent["optim"], rel=1e-3), "but for padding"
    assert sent["optim"] < sent["optim_grads"] <= sent["optim_grads_params-all"] < sent["optim_grads_params-2"]
    assert sent["optim_grads_params-all"] <= sent["optim_grads_params-3"] <= sent["optim_grads_params-2"]


def short_of_memory(place: Place) -> str:
    """Rank 1 cannot build at first; then both can."""
    mesh = build_mesh(Layout(dp=2).config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))

    def build() -> str:
        if place.rank == 1:
            raise torch.OutOfMemoryError
        return "built"

    with pytest.raises(OutOfMemory):
        built_everywhere(build, mesh)
    return built_everywhere(lambda: "built later", mesh)


def test_ranks_agree_on_a_mode_that_does_not_fit(cluster: Cluster) -> None:
    assert cluster.run(2, short_of_memory) == ["built later"] * 2


def test_random_tokens_are_those_of_the_dataset(product: Product) -> None:
    """A configuration may leave the vocabulary to its data."""
    for data, size in ((("--data-path", str(product.data)), VOCAB_SIZE), ((), 32000)):
        options = parse(("--config", "examples/guide.yaml", *data), config_sections(), aliases=MEGATRON)
        config = checked(options, 1)
        [batch, *_] = random_batches(config, Mesh.single())
        assert config.model.vocab_size == size > int(batch.tokens.max())
    with pytest.raises(UserError, match=r"nowhere\.idx"):
        checked(parse(("--config", "examples/guide.yaml", "--data-path", "nowhere"), config_sections(), aliases=MEGATRON), 1)
