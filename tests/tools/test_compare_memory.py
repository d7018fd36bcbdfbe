"""The table of memory: our rows against the engine itself on torch's device meta, FSDP2's against figures worked out by hand, the page against both."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.build import build_engine
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.launch.mesh import build_mesh
from tools.compare_memory import (
    COLUMNS,
    OPTIMIZERS,
    fsdp2,
    optimizer_rows,
    optimizer_table,
    our_plan,
    ours,
    rows,
    shard_all,
    shard_layers,
    table,
)

from tests.engine.test_allocations import META, Made, without_devices
from tests.launcher import ROOT

PAGE = ROOT / "docs" / "performance.md"
RANKS = 8
VOCABULARY = 128_256 * 4096
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096 + 2 * 4096


@pytest.mark.parametrize(("strategy", "slots"), [("optim_grads_params", 2), ("optim_grads_params", 3), ("optim", 2)])
def test_ours_is_what_the_engine_allocates(strategy: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 8B of them, on a rank in the middle."""
    options, plan = our_plan(RANKS, 32, strategy, slots)
    with without_devices(monkeypatch):
        mesh = replace(build_mesh(Config(), rank=3, world_size=RANKS, device=torch.device("cpu")), device=META)
        with Made() as made:
            # What decays and what does not: two groups, as shard() makes of torch's AdamW.
            options = replace(options, groups=(UpdateOptions(), UpdateOptions(weight_decay=0.0)), grad_divisor=float(RANKS))
            engine = build_engine(options, plan, mesh, attach=lambda placed, view, handle: None)
    assert engine.bucket_plan is plan
    row = ours("", RANKS, 32, strategy=strategy, param_slots=slots)
    assert made.storages.live == row.total == sum(row.parts) > 2e10
    assert len(row.parts) == len(COLUMNS)


@pytest.mark.long
def test_fsdp2_holds_what_its_groups_need() -> None:
    """Of two layers. Vectors of 4096 elements are the difference to whole numbers of matrices."""
    elements = 2 * VOCABULARY + 2 * LAYER + 4096
    expected = {
        # The head's turn: it was gathered, copied to its parameters, and its gradient is about to be sent in fp32.
        shard_all: (12 * elements // 8, 0, 4 * elements // 8, 2 * 2 * VOCABULARY, 4 * VOCABULARY),
        # The root's turn, embedding and head in one message: bf16 gradients, and a buffer in fp32.
        shard_layers: (12 * elements // 8, 0, 4 * elements // 8, 0, (2 + 4) * 2 * VOCABULARY),
    }
    for wrap, parts in expected.items():
        found = fsdp2("", wrap, RANKS, 2).parts
        assert found == pytest.approx(parts, rel=1e-4), wrap


def test_the_page_has_our_rows() -> None:
    page = PAGE.read_text()
    for line in table([ours("shard, 2 parameter slots", RANKS, 32), ours("shard, 3 parameter slots", RANKS, 32, param_slots=3)])[2:]:
        assert line in page, line


def test_the_page_has_our_optimizers() -> None:
    """And what FSDP2's rows say of state is what torch's own optimizers keep: so many numbers in fp32 beside the parameter."""
    lines = PAGE.read_text().split("compare_memory --optimizers")[1].split("\n## ")[0].splitlines()
    rows_of_page = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in lines if " | " in line}
    elements = 2 * VOCABULARY + 32 * LAYER + 4096
    matrices = 32 * (LAYER - 2 * 4096)
    kept = {"AdamW": 2.0, "SGD with momentum": 1.0, "Adam with amsgrad": 3.0, "schedule-free AdamW": 2.0, "Muon": 2.0 - matrices / elements}
    for name, (make, torchs) in OPTIMIZERS.items():
        found = rows_of_page[name]
        row, once = (ours(name, RANKS, 32, param_slots=slots, make=make) for slots in (2, None))
        assert [found[0], found[2], found[4]] == [f"{size / 1e9:.2f}" for size in (row.parts[0], row.total, once.total)], name
        assert (torchs is None) == (name not in kept)
        if name in kept:
            assert found[1] == f"{4 * elements * (1 + kept[name]) / RANKS / 1e9:.2f}", name


@pytest.mark.soak
def test_the_page_has_all_optimizers() -> None:
    lines = optimizer_table(list(optimizer_rows(RANKS, 32)))
    assert [line for line in lines if line not in PAGE.read_text()] == [] and len(lines) == 2 + len(OPTIMIZERS)


@pytest.mark.soak
def test_the_page_has_all_rows() -> None:
    page = PAGE.read_text()
    lines = table(list(rows(RANKS, 32)))
    assert [line for line in lines if line not in page] == [] and len(lines) == 8
    assert re.search(r"python -m tools\.compare_memory$", page, re.MULTILINE)
