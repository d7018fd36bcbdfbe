"""Preference tuning as its users run it: every method, layouts, resuming, the reference's scores, and what is exported."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from megatron_llama.data.corpus import docstring_pairs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.product import DP2_PARAMS, MIXED, ONE, Layout, Product, assert_same_state, log, words
from tests.e2e.test_start import tags
from tests.launcher import Finished, Run

SEQ_LENGTH, GLOBAL, ITERS = 160, 4, 4
TUNING = {
    "seq_length": SEQ_LENGTH, "micro_batch_size": 2, "global_batch_size": GLOBAL, "train_iters": ITERS, "lr_decay_iters": ITERS, "lr": 1e-3,
    "log_interval": 1, "split": "90,10,0", "packing": True,
}
EVALUATED = {"eval_interval": 2, "eval_iters": 2}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
LOGPS = ("logps/chosen", "logps/rejected")
Align = Callable[..., Finished]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signatures, each with its documentation and with the same words in reverse, in TRL's format."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    found = islice(((q, a.split()) for q, a in docstring_pairs() if len(q) < 30 and 20 < len(a) < 50 and len(set(a.split())) > 2), 60)
    lines = [json.dumps({"prompt": q, "chosen": " ".join(["", *a]), "rejected": " ".join(["", *a[::-1]])}) for q, a in found]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def start(product: Product, base: Path, pairs: Path) -> Callable[..., Run]:
    """Start ``align``; what it is to be unless told otherwise is in TUNING."""

    def started(layout: Layout = ONE, **changes: object) -> Run:
        options = {"init_from_hf": base, "train_data": pairs, **TUNING, **layout.options, **changes}
        return product.launcher.start(["align", *words(options)], layout.processes)

    return started


@pytest.fixture(scope="module")
def align(start: Callable[..., Run]) -> Align:
    """Run it to its end."""

    def run(layout: Layout = ONE, **changes: object) -> Finished:
        return start(layout, **changes).wait()

    return run


@pytest.fixture(scope="module")
def straight(align: Align, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of dpo with a held-out split."""
    folder = tmp_path_factory.mktemp("straight")
    align(save=folder, sft_loss_weight=0.5, tensorboard_dir=folder / "board", **EVALUATED).ok()
    return folder


def column(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in log(folder) if "loss" in entry]


def numbers(folder: Path) -> list[dict[str, object]]:
    """Every line without the times."""
    kept = ("iteration", "consumed_samples", "loss", "grad_norm", "kl", "nll_loss")
    return [{k: v for k, v in entry.items() if k in kept or "validation" in k or "/" in k} for entry in log(folder)]


METHODS = {"dpo": {}, "orpo": {}, "kto": {}, "reward": {"lr": 3e-3}}
"""Each that says other numbers, or begins with another model. Of the others: tests/tune/preference."""


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str, align: Align, tmp_path: Path) -> None:
    """Each sample once and again: the loss falls, and the log has the numbers under TRL's names."""
    options = {"train_iters": 12, "lr_decay_iters": 12, "split": "100,0,0", "lr_decay_style": "constant", "global_batch_size": 8}
    ended = align(method=method, save=tmp_path, **{**options, **METHODS[method]}).ok()
    losses = column(tmp_path, "loss")
    assert sum(losses[-3:]) < sum(losses[:3]) and f" method {method}; chat template: " in ended.out
    entry = log(tmp_path)[-1]
    expected = {*REWARDS, *LOGPS}
    expected -= {"rewards/accuracies"} if method == "kto" else set(LOGPS) if method == "reward" else set()
    assert expected <= entry.keys() and ("kl" in entry) is (method == "kto") and ("nll_loss" in entry) is (method == "orpo")
    assert " | loss: " in ended.out and "lm loss" not in ended.out and " | rewards/margins: " in ended.out
    assert entry["rewards/margins"] > log(tmp_path)[0]["rewards/margins"]


@pytest.mark.long
def test_what_zenflow_puts_off_stays_so_for_ktos_estimate(align: Align, tmp_path: Path) -> None:
    """The forward passes of the estimate have the weights of the step: they apply nothing, and the run is AdamW's no longer."""
    zenflow = {"optimizer_offload": "zenflow", "zenflow_update_interval": 4, "zenflow_topk_ratio": 0.1}
    runs = {"adamw": (ONE, {}), "zenflow": (ONE, zenflow), "dp2": (DP2_PARAMS, zenflow)}
    for name, (layout, changes) in runs.items():
        align(layout, method="kto", save=tmp_path / name, **changes).ok()
    adamw, found, split = (column(tmp_path / name, "loss") for name in runs)
    assert found[:2] == adamw[:2] and found[2] != pytest.approx(adamw[2], rel=1e-5)
    assert split == pytest.approx(found, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("layout", [DP2_PARAMS, MIXED], ids=["dp2 params", "everything"])
def test_every_layout_tunes_the_same_model(layout: Layout, align: Align, straight: Path, tmp_path: Path) -> None:
    """What is logged of training and of the pairs that are held out, and the scores are those of another layout."""
    ended = align(layout, save=tmp_path, sft_loss_weight=0.5, **EVALUATED).ok()
    assert " reference scores of training: " in ended.out and "written to" not in ended.out
    found, expected = numbers(tmp_path), numbers(straight)
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected] and len(found) == ITERS + 3
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            # Before the first step margins are 0 but for rounding, which decides what is accurate.
            if name.endswith("accuracies") and theirs["iteration"] in (0, 1):
                continue
            # A margin is a difference of sums of log-probabilities of about -300.
            assert ours[name] == pytest.approx(value, rel=2e-5, abs=2e-5), (name, ours, theirs)


def test_what_is_held_out_is_evaluated(straight: Path) -> None:
    evaluated = [entry for entry in log(straight) if "validation_loss" in entry]
    assert [entry["iteration"] for entry in evaluated] == [0, 2, 4]
    assert {entry["validation_pairs"] for entry in evaluated} == {6}
    for name in (*REWARDS, *LOGPS, "nll_loss"):
        assert all(f"validation_{name}" in entry for entry in evaluated)
    first = evaluated[0]
    # Before the first step the model is its reference: no reward, and ln 2 with half of the likelihood term.
    assert [first[f"validation_{name}"] for name in REWARDS] == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert first["validation_loss"] == pytest.approx(0.6931472 + 0.5 * first["validation_nll_loss"], rel=1e-6)
    assert evaluated[-1]["validation_rewards/margins"] > 0


def test_what_tensorboard_shows(straight: Path) -> None:
    """Curves under TRL's names, those of what is held out beside them, and no perplexity."""
    shown = tags(straight / "board")
    for name in ("loss", *REWARDS, *LOGPS, "nll_loss"):
        assert shown[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in enumerate(column(straight, name), 1)]
        evaluated = [(e["iteration"], e[f"validation_{name}"]) for e in log(straight) if "validation_loss" in e]
        assert shown[f"{name} validation"] == [(step, pytest.approx(value, rel=1e-6)) for step, value in evaluated]
    assert not any("lm loss" in name or "ppl" in name for name in shown)


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(start: Callable[..., Run], align: Align, straight: Path, tmp_path: Path) -> None:
    options = {"save": tmp_path, "sft_loss_weight": 0.5, "save_interval": 1, **EVALUATED}
    run = start(**options)
    run.until(lambda: (tmp_path / "iter_0000002" / "meta.json").exists())
    run.signal(signal.SIGKILL)
    run.wait()
    align(load=tmp_path, init_from_hf=None, **options).ok()
    assert numbers(tmp_path) == numbers(straight)
    assert_same_state(tmp_path / f"iter_{ITERS:07d}", straight / f"iter_{ITERS:07d}")


@pytest.mark.long
def test_low_rank_additions_and_offload(align: Align, base: Path, tmp_path: Path) -> None:
    """With additions the reference is their base; an update on the host is the one on the device."""
    lora = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2}
    align(save=tmp_path / "lora", export_hf=tmp_path / "hf", **lora).ok()
    margins = column(tmp_path / "lora", "rewards/margins")
    assert margins[0] == pytest.approx(0, abs=1e-5) and margins[-1] > 0.01
    align(DP2_PARAMS, save=tmp_path / "dp2", **lora).ok()
    assert column(tmp_path / "dp2", "loss") == pytest.approx(column(tmp_path / "lora", "loss"), rel=1e-5)
    for name, options in (("plain", {}), ("offload", {"optimizer_offload": "exact"})):
        align(save=tmp_path / name, train_iters=3, **options).ok()
    assert column(tmp_path / "offload", "loss") == column(tmp_path / "plain", "loss")


@pytest.mark.long
def test_scores_belong_to_what_was_scored(align: Align, product: Product, base: Path, pairs: Path, tmp_path: Path) -> None:
    """Written without a step, in one layout; read in another; those of another model, template or file are refused."""
    scores = tmp_path / "scores.safetensors"
    options = {"reference_scores": scores, "train_iters": 1, "packing": True}
    alone = align(only_reference_scores=True, **options).ok()
    assert f" reference scores of training: written to {scores}\n" in alone.out and " iteration " not in alone.out
    written = scores.read_bytes()
    read = align(DP2_PARAMS, **options).ok()
    assert f" reference scores of training: {scores}\n" in read.out and scores.read_bytes() == written
    other = tmp_path / "other.jsonl"
    other.write_text("".join(pairs.read_text().splitlines(keepends=True)[1:]))
    for changes, names in (
        ({"train_data": other}, "samples"),
        ({"chat_template": "llama2"}, "chat template or tokenizer"),
        ({"init_from_hf": tmp_path / "hf"}, "reference model"),
    ):
        if "init_from_hf" in changes and not (tmp_path / "hf").exists():
            product.train(export_hf=tmp_path / "hf", train_iters=1, max_position_embeddings=SEQ_LENGTH)
        refused = align(**{**options, **changes})
        assert refused.codes == (1,) and f"{scores} has the reference scores of something else" in refused.err
        assert f"  - {names}: got " in refused.err, refused.err


@pytest.mark.long
def test_what_is_exported(align: Align, tmp_path: Path) -> None:
    """A policy as transformers reads it, and what it says while it trains."""
    asked = {"sample_interval": 2, "sample_prompt": "def f(self)", "sample_tokens": 3}
    ended = align(method="orpo", train_iters=2, export_hf=tmp_path / "hf", **asked).ok()
    assert " sample at iteration 2 | 'def f(self)' | " in ended.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@pytest.mark.long
def test_a_reward_model_is_exported(align: Align, tmp_path: Path) -> None:
    align(method="reward", train_iters=2, save=tmp_path / "run", export_hf=tmp_path / "hf").ok()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.num_labels == 1 and model(torch.arange(8)[None]).logits.shape == (1, 1)
    refused = align(method="dpo", init_from_hf=tmp_path / "hf", train_iters=1)
    assert refused.codes == (2,) and "--method dpo: got a reward model" in refused.err


def test_a_dry_run_plans_without_files(align: Align, tmp_path: Path) -> None:
    planned = align(dry_run="yes").ok()
    assert "leaves it out" not in planned.out and "precedes each step" in align(dry_run="yes", method="kto").ok().out
    assert planned.out.endswith("valid for 1 process\n") and "method dpo; chat template: " in planned.out
    planned = align(dry_run="yes", train_data=None, init_from_hf=None, model="llama2-7b", bf16=True, world_size=2).ok()
    assert "--train-data is not given: the run itself needs it" in planned.out
