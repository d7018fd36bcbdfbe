"""The examples around a user's own module: they run as they are written, and the guide's page shows them as they are."""

from __future__ import annotations

import difflib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import megatron_llama as ml
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launcher import ROOT, free_port, torchrun

FOLDER = ROOT / "examples" / "own_module"
PAGE = (ROOT / "docs" / "guide" / "11-your-own-module.md").read_text()
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()


def run(script: str | Path, *arguments: object, folder: Path, processes: int = 2) -> str:
    """What rank 0 printed."""
    place = torchrun(processes, free_port())
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    ranks = []
    for rank in range(processes):
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
        ranks.append(
            subprocess.Popen(command, env=environ | place(rank), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outs = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, "\n".join(outs)
    return outs[0]


def steps(printed: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(float(loss), float(norm)) for loss, norm in re.findall(r"^step \d+ loss (\S+) norm (\S+)$", printed, re.MULTILINE)]


@pytest.mark.long
def test_three_lines_lead_from_fsdp2_to_shard(tmp_path: Path) -> None:
    """The losses of both are the same within the bounds of docs/numerics.md for fp32, and so are the norms."""
    theirs, ours = (steps(run(script, ROOT / "README.md", folder=tmp_path)) for script in ("fsdp2.py", "shard.py"))
    assert len(theirs) == 20 and theirs[-1][0] < theirs[0][0] - 1
    for one, other in zip(theirs, ours, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-6, abs=1e-6)
        assert other[1] == pytest.approx(one[1], rel=2e-5)


def test_the_guide_shows_the_difference_as_it_is() -> None:
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("fsdp2.py", "shard.py"))
    names = ("examples/own_module/fsdp2.py", "examples/own_module/shard.py")
    shown = re.search(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == list(difflib.unified_diff(before, after, *names, lineterm="", n=1))
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) == 3, new


@pytest.mark.long
def test_a_resnet_learns(tmp_path: Path) -> None:
    printed = run("resnet.py", folder=tmp_path)
    found = steps(printed)
    assert len(found) == 30 and found[-1][0] < 0.2 < found[0][0]
    assert re.search(r"^right: (0\.9\d|1\.00)$", printed, re.MULTILINE), printed


@pytest.mark.long
def test_a_trainer_of_transformers_trains(tmp_path: Path) -> None:
    """tests/integrations compares such a run with DDP."""
    printed = run("hf_trainer.py", ROOT / "README.md", folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == 12 and losses[-1] < losses[0], printed


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, around a small model in one process. What the last one loads is what was saved."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    units, *blocks = blocks
    [muon] = [block for block in blocks if "ml.Muon" in block]
    [inside] = [block for block in blocks if "parallelize_module" in block]  # engine/shard/test_tp_inside.py has the ranks that it needs
    blocks.remove(muon)
    blocks.remove(inside)
    assert len(blocks) == 7
    generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False)
    model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    ids = torch.arange(8)[None]
    layer = other.model.layers[0]
    said = {"model": other, "ml": ml, "torch": torch, "DecoderLayer": type(layer), "Router": type(layer.mlp), "RMSNorm": type(other.model.norm)}
    for block in (units, muon):
        said["model"] = fresh = LlamaForCausalLM(config)
        exec(block, said)
        with said["engine"] as engine:
            fresh(input_ids=ids, labels=ids).loss.backward()
            assert not engine.step().skipped
    with (
        ml.shard(model, units=[type(model.model.layers[0])]) as engine,
        ml.shard(generator) as generator_engine,
        ml.shard(critic) as critic_engine,
    ):
        names = {"model": model, "engine": engine, "ids": ids, "torch": torch}
        names |= {"generator": generator, "generator_engine": generator_engine, "critic": critic, "critic_engine": critic_engine}
        names |= {"noise": torch.ones(2, 4), "generator_loss": torch.mean, "steps": 2, "folder": tmp_path / "pretrained"}
        names["dist"] = SimpleNamespace(get_rank=lambda: 0, all_reduce=lambda tensor: None)
        model(input_ids=ids, labels=ids).loss.backward()
        engine.step()
        for block in blocks:
            exec(block, names)
        loss = names["loss"].item()
        with torch.no_grad():
            assert model(input_ids=ids, labels=ids).loss.item() == loss
        weights = engine.state_dict()["model"]
        assert names["norm"].item() == pytest.approx(sum(value.square().sum().item() for value in weights.values()) ** 0.5)
        assert load_file(tmp_path / "pretrained" / "model.safetensors").keys() == weights.keys()


def test_the_pages_name_what_the_engine_has() -> None:
    named = set(re.findall(r"\bengine\.(\w+)", PAGE + MIGRATING)) - {"backward", "optimizer", "result"}
    assert {name for name in named if not hasattr(ml.ModuleEngine, name)} == set()


def test_what_the_pages_say_of_arguments_exists() -> None:
    known = set(inspect.signature(ml.shard).parameters)
    section = MIGRATING[MIGRATING.index("## From FSDP2, DDP or DeepSpeed") : MIGRATING.index("## From Megatron-LLaMA")]
    rows = re.findall(r"^\| .* \| (.*) \|$", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row)} | {
        name for row in rows for name in re.findall(r"(\w+)=", " ".join(re.findall(r"shard\((.*?)\)", row)))
    }
    assert len(rows) > 25 and len(named) > 10
    assert named - known - {"modify", "shard"} == set()
