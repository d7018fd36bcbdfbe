"""Fuzzing: what becomes of drawn cases is told, and one that fails is made small."""

import math
import shlex

import pytest
from megatron_llama.config.megatron_names import ALIASES, MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.errors import ConfigError
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.draw import axis_sizes, draw, refusal
from megatron_llama.prove.fuzz import Finding, command_line, finding_of, fuzz, given_options, smallest
from megatron_llama.prove.given import EXAMPLES, SECTIONS
from megatron_llama.prove.proof import THE_RUN, CheckResult, Proof

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 511, "seq_length": 32}
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True, "reduce_bucket_size": 20000}
NUMBERS = {"z_loss_weight": 0.1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "clip_grad": 0.0, "lr": 1e-2, "weight_decay": 0.3}
LARGE = Case("large", {**SIZES, **LAYOUT, **NUMBERS, "packing": True}, 8, sft=True)


def planted(case: Case) -> Finding:
    """A fault of tensor parallelism with z-loss and no clipping, in two layers or more."""
    error = refusal(case)
    if error is not None:
        raise error
    wrong = (
        axis_sizes(case)["tp"] > 1
        and "z_loss_weight" in case.options
        and case.options.get("clip_grad") == 0.0
        and case.options["num_hidden_layers"] != 1
    )
    return Finding("failed", "z-loss", "z") if wrong else Finding("equal")


def test_a_failing_case_is_made_as_small_as_it_gets() -> None:
    small = smallest(LARGE, planted, "z", runs=100)
    others = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "z_loss_weight", "clip_grad"}
    assert small.options.keys() == others | SIZES.keys()
    assert (small.world_size, small.sft, axis_sizes(small)) == (2, False, {"tp": 2, "cp": 1, "pp": 1, "dp": 1})
    assert (small.options["num_hidden_layers"], small.options["hidden_size"]) == (2, 32)


def test_a_failure_of_another_kind_is_not_mistaken_for_it() -> None:
    """And making a case small takes so many runs at most."""

    def two_faults(case: Case) -> Finding:
        return Finding("failed", "", "z" if "lr" in case.options else "other")

    assert "lr" in smallest(LARGE, two_faults, "z", runs=60).options


    judged: list[Case] = []

    def counted(case: Case) -> Finding:
        judged.append(case)
        return Finding("failed", "", "z")

    smallest(LARGE, counted, "z", runs=3)
    assert len(judged) == 3


def test_what_became_of_each_case_is_told() -> None:
    cases = draw(1, 6)
    said: list[str] = []

    def judge(case: Case) -> Finding:
        number = [one.options for one in cases].index(case.options) if case.options in [one.options for one in cases] else 1
        if number == 0:
            raise ConfigError("--lr", got="-1", expected="0 or more", do="give another")
        if number == 1:
            raise ZeroDivisionError("found")
        return Finding("equal")

    report = fuzz(judge, 1, 6, say=said.append, runs=5)
    assert report.counts == {"refused": 1, "failed": 1, "equal": 4} and not report.holds
    text = "\n".join(said)
    assert "--lr: got -1, expected 0 or more; give another" in text
    assert "ZeroDivisionError: found" in text and "python -m megatron_llama prove --world-size" in text
    assert said[-1] == "6 configurations drawn from seed 1: 1 refused, 4 equal, 1 failed"


def test_control_c_ends_with_what_was_found() -> None:
    """Also while a failing case is made small: how it fails, and the command that runs it, have been said."""
    said: list[str] = []
    judged: list[Case] = []

    def judge(case: Case) -> Finding:
        judged.append(case)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return Finding("failed", "z-loss differs", "z") if len(judged) == 2 else Finding("equal")

    with pytest.raises(KeyboardInterrupt):
        fuzz(judge, 1, 6, say=said.append)
    assert said[0] == "6 configurations from seed 1" and said[1].startswith("   1 of 6  equal")
    assert said[2].startswith("   2 of 6  failed") and said[3].strip() == "z-loss differs"
    assert said[4].strip() == command_line(judged[1])
    assert said[5:] == ["interrupted; 2 configurations drawn from seed 1: 0 refused, 1 equal, 1 failed"]


@pytest.mark.parametrize("seed", [1, 4])
def test_the_command_says_what_the_case_says(seed: int) -> None:
    for case in draw(seed, 6):
        if refusal(case) is not None:
            continue
        words = shlex.split(command_line(case))
        assert words[:4] == ["python", "-m", "megatron_llama", "prove"] and words[4:6] == ["--world-size", str(case.world_size)]
        parsed = parse(words[6:], SECTIONS, aliases={**MEGATRON, **ALIASES})
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given_options(case).items()}
        read = {name: getattr(instance, name) for instance in parsed.instances.values() for name in vars(instance)}
        assert {name: list(read[name]) if isinstance(read[name], tuple) else read[name] for name in parsed.explicit} == given
        assert bool(parsed.explicit & EXAMPLES) == case.sft


def proof_with(*rows: Row) -> Proof:
    return Proof(LARGE, (CheckResult("one process", rows, 1.0),), None, 1.0)


HOLDS = Row("one process", "loss", 0.0, 1.0)


def test_what_becomes_of_a_proof() -> None:
    """It is told in a line; and only what no run could begin with is refused."""
    wrong = finding_of(proof_with(HOLDS, Row("one process", "gradient", 0.5, 1e-5, 2, "model.norm.weight")))
    assert (wrong.verdict, wrong.kind) == ("failed", "one process: gradient")
    assert "model.norm.weight in step 2: got 0.5, bound 1e-05 (1 of 2 rows do not hold)" in wrong.reason
    ends = [("megatron_llama.errors.DataError", (), "refused"), ("megatron_llama.errors.DataError", (HOLDS,), "failed")]
    ends += [("megatron_llama.errors.TrainingError", (), "failed"), ("AssertionError", (), "failed")]
    for error, before, verdict in ends:
        row = Row("one process", THE_RUN, math.inf, 0.0, note=f"rank 1: {error}: no example, which is long: enough")
        ended = finding_of(proof_with(*before, row))
        assert (ended.verdict, ended.kind) == (verdict, f"one process: {error.rpartition('.')[2]}")
