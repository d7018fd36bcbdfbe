"""Options of ``align`` that cannot be meant: refused by name, all at once, before a file is read."""

from __future__ import annotations

import json
import shlex

import pytest
from megatron_llama.cli import main
from megatron_llama.config.parse import options_of
from megatron_llama.errors import ConfigError
from megatron_llama.tune.commands.align import SECTIONS
from megatron_llama.tune.preference.align_config import BETAS, AlignConfig
from megatron_llama.tune.preference.option_problems import READ_BY, align_problems, objective_changes, objective_fields

from tests.refusals import TRAINING

ALONE = "which alone read it; leave it out, or choose another method"
REFUSED = {
    "--data-path x": "--data-path: got x, expected nothing: align reads --train-data",
    "--reset-attention-mask": "--reset-attention-mask: got True, expected nothing: align reads --train-data",
    "--data-format auto": "--data-format: got a value, expected nothing: conversations are no preferences",
    "--loss-on all": "--loss-on: got a value, expected nothing: the loss compares the answers that are judged",
    "--neftune-noise-alpha 5": "--neftune-noise-alpha: got a value, expected nothing: noise would blur",
    "--split 1,1,0 --valid-data y": "--split, --valid-data: got both",
    "--simpo-gamma 1": f"--simpo-gamma: got a value, with --method dpo, expected --method simpo, {ALONE}",
    "--method reward --beta 1": f"--beta: got a value, with --method reward, expected --method dpo or ipo or orpo or simpo or kto, {ALONE}",
    "--method ipo --label-smoothing 0.1": f"--label-smoothing: got a value, with --method ipo, expected --method dpo, {ALONE}",
    "--method kto --sft-loss-weight 1": f"--sft-loss-weight: got a value, with --method kto, expected --method dpo or ipo or simpo, {ALONE}",
    "--method orpo --reference-scores f": f"--reference-scores: got a value, with --method orpo, expected --method dpo or ipo or kto, {ALONE}",
    "--method simpo --only-reference-scores": "--only-reference-scores: got a value, with --method simpo",
    "--beta 0": "--beta: got 0, expected more than 0; 0.1 is the usual one",
    "--method simpo --beta -1": "--beta: got -1, expected more than 0; 2 is the usual one",
    "--label-smoothing 0.5": "--label-smoothing: got 0.5, expected 0 or more, and less than 0.5",
    "--sft-loss-weight -1": "--sft-loss-weight: got -1.0, expected 0 or more",
    "--method simpo --simpo-gamma -1": "--simpo-gamma: got -1.0, expected 0 or more",
    "--method kto --desirable-weight -1": "--desirable-weight: got -1.0, expected 0 or more",
    "--method kto --desirable-weight 0 --undesirable-weight 0": "--desirable-weight, --undesirable-weight: got 0 for both",
    "--method reward --center-rewards-coefficient -1": "--center-rewards-coefficient: got -1.0, expected 0 or more",
    "--preference-format completion_label": "--preference-format: got completion_label, with --method dpo, expected pairs of answers",
    "--method reward --sample-interval 2 --sample-prompt a": "--sample-interval, --sample-prompt: got texts to continue, with --method reward",
    "--z-loss-weight 1e-4": "--z-loss-weight: got 0.0001, expected 0",
}


def test_what_a_method_does_not_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in REFUSED.items():
        assert main(["align", *shlex.split(words), "--train-data", "pairs.jsonl"]) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: These options cannot be used:\n  - ")
        assert f"  - {said}" in complaint and complaint.count("\n  - ") == 1
    words = "--data-path x --loss-on all --simpo-gamma 1 --beta 0 --z-loss-weight 1"
    assert main(["align", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n  - ") == 6  # that --train-data is missing is the sixth


def test_every_option_of_a_method_has_its_methods() -> None:
    """One that is not in the table is read by all of them."""
    others = {"method", "preference_format"}
    assert READ_BY.keys() == set(AlignConfig.__dataclass_fields__) - others
    assert {method for methods in READ_BY.values() for method in methods} == {*BETAS, "reward"}
    assert "align" in TRAINING and "method" in options_of(SECTIONS) and align_problems


@pytest.mark.parametrize("command", ["pretrain", "sft", "prove", "plan"])
def test_other_commands_say_whose_option_it_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--sft-loss-weight", "1"]) == 2
    complaint = capsys.readouterr().err
    assert "--sft-loss-weight: got an unknown flag, expected an option of this command; " in complaint
    assert complaint.endswith("align has --sft-loss-weight\n")


def test_a_resumed_run_keeps_its_loss() -> None:
    """Another method is refused; another value of an option of the loss is told, and a default that is given is none."""
    before = json.loads(json.dumps(objective_fields(AlignConfig())))
    assert objective_changes("runs/iter_0000008", before, AlignConfig(beta=0.1, reference_scores="scores")) == ()
    (line,) = objective_changes("runs/iter_0000008", before, AlignConfig(beta=0.5))
    assert line == "--beta was 0.1 when the checkpoint was saved and is 0.5: the loss is another one"
    for method in ("ipo", "simpo"):
        with pytest.raises(ConfigError, match=f"--method: got {method}, expected dpo, with which runs/iter_0000008 was trained"):
            objective_changes("runs/iter_0000008", before, AlignConfig(method=method))
