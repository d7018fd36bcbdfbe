"""Reward models: to HuggingFace and back bit for bit, as the same class computes them, with PEFT, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.model_folders.export import export_adapter
from megatron_llama.checkpoint.model_folders.formats import open_model
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.checkpoint.model_folders.peft.adapter import PeftAdapter
from megatron_llama.checkpoint.native import TrainState
from megatron_llama.cli import main
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.hf import hf_config_from_model, model_config_from_hf, padding_token, read_hf_config
from megatron_llama.model.plan.params import SCORE
from megatron_llama.train.setup.checks.warnings import warnings_of
from megatron_llama.train.setup.inputs import resumes
from megatron_llama.train.setup.resolve import problems
from megatron_llama.train.setup.start import compare, find_start, weights_of
from transformers import AutoModelForSequenceClassification

from tests.checkpoint.cases import load_under, merged, same, save_under
from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import assert_same_model, convert, hf_folder, refusal
from tests.harness import Cluster
from tests.model.families.twins import SCORED, TWINS
from tests.model.test_reward import hf_reward_model, reward_model
from tests.parallel.cases import MODEL, Layout, initial_weights
from tests.tune.preference.cases import CASES, RewardLayout, aligner, layout_for

Capture = pytest.CaptureFixture[str]


def saved(folder: Path, family: str = "llama", **shards: Any) -> Path:
    """A reward model as transformers saves it."""
    hf_reward_model(reward_model(TWINS[family].ours)).save_pretrained(folder, **shards)  # type: ignore[operator]
    return folder


def scores(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Those that transformers reads at the last token that is no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    ids = (torch.arange(40).view(2, 20) * 7 % 299) + 1
    ids[1, 15:] = model.config.pad_token_id
    with torch.no_grad():
        found: torch.Tensor = model.eval()(ids).logits
    return found


@pytest.mark.few(4)
@pytest.mark.tries("pad_token_id")
@pytest.mark.parametrize("family", SCORED)
def test_a_reward_model_of_every_family_goes_to_huggingface_and_back(family: str, tmp_path: Path) -> None:
    original = saved(tmp_path / "original", family)
    back = convert(convert(original, tmp_path / "native", "--to", "native"), tmp_path / "back", "--to", "hf")
    assert_same_model(back, original)
    assert read_hf_config(back).num_labels == 1 and tensors(back)[SCORE].shape == (1, MODEL.hidden_size)
    assert json.loads((back / "config.json").read_text())["architectures"][0].endswith("ForSequenceClassification")
    assert torch.equal(scores(back), scores(original))


def test_verify_compares_scores(tmp_path: Path, capsys: Capture) -> None:
    original = saved(tmp_path / "original", "gemma2")
    native_folder = convert(original, tmp_path / "native", "--to", "native")
    assert main(["verify", str(native_folder), str(original), "--prompt-tokens", "40"]) == 0
    said = capsys.readouterr().out
    assert "logits of B in transformers on these weights: equal" in said and "verdict: equal" in said
    other = hf_reward_model(reward_model(TWINS["gemma2"].ours))
    other.score.weight.data[0, 3] += 0.5  # type: ignore[union-attr, operator, index]
    other.save_pretrained(tmp_path / "other")  # type: ignore[operator]
    assert main(["verify", str(tmp_path / "other"), str(original), "--prompt-tokens", "40"]) == 1
    said = capsys.readouterr().out
    assert "score.weight: 1 of 64 elements" in said and "verdict: different: weights, logits" in said


@pytest.mark.parametrize("form", ["megatron", "torch_dist", "meta", "megatron-llama"])
def test_other_formats_refuse_a_score(form: str, tmp_path: Path, capsys: Capture) -> None:
    said = refusal(capsys, saved(tmp_path / "original", "qwen3"), tmp_path / "out", "--to", form, status=2)
    assert "num_labels: got 1, expected 0, as in LLaMA" in said


def test_what_needs_an_output_head_refuses_it(tmp_path: Path, capsys: Capture) -> None:
    folder = saved(tmp_path / "reward")
    text = tmp_path / "text.txt"
    text.write_text("Some words.\n")
    commands = [
        ["generate", "--load", str(folder), "--prompt", "x"],
        ["chat", "--load", str(folder)],
        ["evaluate", "--load", str(folder), "--text", str(text)],
        ["pretrain", "--init-from-hf", str(folder), "--data-path", str(tmp_path / "none"), "--train-iters", "1"],
        ["pretrain", "--load", str(folder), "--data-path", str(tmp_path / "none"), "--train-iters", "1"],
        ["sft", "--init-from-hf", str(folder), "--train-data", str(text), "--train-iters", "1", "--seq-length", "16"],
    ]
    for words in commands:
        status = main(words)
        said = capsys.readouterr().err
        assert status != 0 and "a reward model (num_labels 1), which has a score" in said, (words, said)


def test_classifiers_of_several_labels_and_other_classes_are_refused(tmp_path: Path) -> None:
    fields = hf_config_from_model(reward_model(), dtype="float32")
    two = fields | {"id2label": {"0": "bad", "1": "good"}, "num_labels": 2}
    unsaid = {name: value for name, value in fields.items() if name not in ("id2label", "num_labels", "label2id")}
    for wrong in (two, unsaid):
        with pytest.raises(CheckpointError, match="2 labels, expected 1 label"):
            model_config_from_hf(wrong, where="config.json")
    with pytest.raises(CheckpointError, match="only causal language models and reward models"):
        model_config_from_hf(fields | {"architectures": ["LlamaForTokenClassification"]}, where="config.json")
    # Of a language model labels say nothing.
    assert model_config_from_hf(two | {"architectures": ["LlamaForCausalLM"]}, where="config.json").num_labels == 0


def test_a_language_model_gets_a_score_and_its_own_padding(tmp_path: Path) -> None:
    """The score is drawn from the seed, whichever part of it is read; padding that ends texts would move the place of the score."""
    source = HFWeights(hf_folder(tmp_path / "hf", pad_token_id=3))
    model = replace(source.model, num_labels=1)
    shape = (1, model.hidden_size)
    whole, part, other = torch.empty(shape), torch.empty(1, 5), torch.empty(shape)
    weights_of(source, model, 7)(Rectangle(SCORE, shape, (0, 0), shape, 0), whole)
    weights_of(source, model, 7)(Rectangle(SCORE, shape, (0, 9), (1, 5), 0), part)
    weights_of(source, model, 8)(Rectangle(SCORE, shape, (0, 0), shape, 0), other)
    assert torch.equal(whole[:, 9:14], part) and not torch.equal(whole, other)
    assert 0.5 < float(whole.std()) / model.initializer_range < 1.5
    assert source.model.pad_token_id == padding_token(model) == 3
    wrong = [replace(model, eos_token_id=2, pad_token_id=token) for token in (2, -1, 10**6, None)]
    assert [padding_token(each) for each in wrong] == [None] * 4
    with pytest.raises(CheckpointError, match="a reward model, which has no output head"):
        weights_of(open_model(saved(tmp_path / "reward")), replace(TWINS["llama"].ours, num_labels=0), 7)


def test_a_language_models_checkpoint_begins_a_reward_model_only_anew(tmp_path: Path) -> None:
    folder = convert(hf_folder(tmp_path / "hf"), tmp_path / "native", "--to", "native")
    options = CheckpointConfig(load=str(folder), finetune=True)
    start = find_start(options)
    assert start is not None
    model = replace(start.model(), num_labels=1)
    assert compare(options, start, start.model(), model) == []
    assert not resumes(Config(model=model, checkpoint=options), start)
    with pytest.raises(CheckpointError, match=r"num_labels: got 0, expected 1, as in this run.*--finetune"):
        compare(replace(options, finetune=False, load_optim=False), start, start.model(), model)
    with pytest.raises(CheckpointError, match="num_labels: got 1, expected 0"):
        compare(options, start, model, start.model())


@pytest.mark.long
def test_a_checkpoint_is_read_under_another_layout(cluster: Cluster, tmp_path: Path) -> None:
    """Weights and moments, those of the score among them, which both tensor-parallel ranks hold."""
    before = cluster.run(2, save_under, RewardLayout(tp=2, sp=True), tmp_path, 0)
    after = cluster.run(2, load_under, RewardLayout(pp=2, dp=1, microbatches=2), tmp_path, 0)
    found, expected = (merged(part for held in ranks for part in held.regions) for ranks in (after, before))
    assert same(found, expected)
    assert any("score" in key and "exp_avg" in key for key in expected)


def test_options_that_need_an_output_head_are_named() -> None:
    config = RewardLayout().sized()
    config = replace(config, training=replace(config.training, train_iters=1))
    assert problems(config, 1) == []
    wrong = replace(
        config, training=replace(config.training, z_loss_weight=1e-4), log=replace(config.log, sample_interval=5, sample_prompt=("x",))
    )
    assert [line.split(":")[0] for line in problems(wrong, 1)] == ["--z-loss-weight", "--sample-interval"]
    several = replace(config, model=replace(config.model, num_labels=3))
    assert "--num-labels: got 3" in problems(several, 1)[0]
    [warning] = [line for line in warnings_of(replace(config, model=replace(config.model, eos_token_id=0))) if "pad-token" in line]
    assert "--pad-token-id 0 is the end token" in warning


def adapted(place: Place, folder: Path, layout: Layout) -> None:
    """Train the additions and the score, and save them."""
    run = aligner(place, layout, CASES["reward"])
    for index in range(2):
        run.step(index)
    native.save(folder, run.optimizer, run.mesh, TrainState(2, 16), layout.config())


@pytest.mark.long
def test_peft_reads_the_additions_with_the_score(cluster: Cluster, tmp_path: Path) -> None:
    """Trained by tensor-parallel ranks on a model without a score: PEFT's model, the merged one and ours score alike."""
    layout = layout_for(Layout(tp=2, sp=True, lora=4), CASES["reward"])
    cluster.run(2, adapted, tmp_path / "run", layout)
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert content["modules_to_save"] == ["score"] and content["task_type"] == "SEQ_CLS"

    # The base model is what the additions were trained beside, with another score.
    base = hf_reward_model(layout.config().model, initial_weights())
    base.score.weight.data.zero_()  # type: ignore[union-attr, operator]
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    found = scores(tmp_path / "base", tmp_path / "adapter")
    merged = tmp_path / "merged"
    words = ["merge", str(tmp_path / "base"), str(merged), "--adapter", str(tmp_path / "adapter")]
    assert main(words) == 0
    torch.testing.assert_close(scores(merged), found, rtol=1e-4, atol=1e-5)
    ours = convert(tmp_path / "run", tmp_path / "ours", "--to", "hf")
    torch.testing.assert_close(scores(ours), found, rtol=1e-4, atol=1e-5)
    score = tensors(ours)[SCORE]
    drawn = torch.empty_like(score)
    initial_weights()(Rectangle(SCORE, tuple(score.shape), (0, 0), tuple(score.shape), 0), drawn)
    assert float((score - drawn).abs().min()) > 0, "the score is trained"
    assert found.abs().max() > 0.01

    (tmp_path / "adapter" / "SHA256SUMS").unlink()  # which would name any other content
    for wrong in (["lm_head"], ["score", "embed_tokens"]):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(content | {"modules_to_save": wrong}))
        with pytest.raises(CheckpointError, match="modules_to_save"):
            PeftAdapter(tmp_path / "adapter", layout.config().model)
