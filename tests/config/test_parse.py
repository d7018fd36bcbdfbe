import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from megatron_llama.config.blend import blend_problems
from megatron_llama.config.foreign_names import FAMILIES, INSTEAD, NOT_NEEDED
from megatron_llama.config.help import field_docs, help_text, main, options_markdown
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import Parsed, differences, options_of, parse
from megatron_llama.config.schema import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ConfigError
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.sft.sft_config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = config_sections()

@dataclass(frozen=True)
class GenerateConfig:
    """Options of a small command."""

    load: str
    """Folder."""
    prompt: tuple[str, ...] = ()
    """Texts."""
    temperature: float = 1.0
    """Sharpness."""
    greedy: bool = False
    """Take the likeliest."""


def run(*argv: str, sections: Sequence[type[Any]] = SECTIONS) -> Parsed:
    return parse(argv, sections, aliases=MEGATRON)


def refusal(*argv: str, sections: Sequence[type[Any]] = SECTIONS) -> list[str]:
    """The problems of a command line, one per line."""
    with pytest.raises(ConfigError) as error:
        run(*argv, sections=sections)
    title, *lines = str(error.value).splitlines()
    assert title == "These options cannot be used:"
    return [line.removeprefix("  - ") for line in lines]


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_field_has_its_help() -> None:
    for section in SECTIONS:
        docs = field_docs(section)
        assert list(docs) == [field.name for field in fields(section)]
        assert all(docs.values())


def test_the_manual_is_current(tmp_path: Path) -> None:
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == options_markdown(SECTIONS, MEGATRON), "run: python -m megatron_llama.config.help docs/options.md"
    main([str(tmp_path / "options.md")])
    assert [path.name for path in tmp_path.iterdir()] == ["options.md"]
    assert (tmp_path / "options.md").read_text(encoding="utf-8") == written


def test_nothing_given_is_all_defaults() -> None:
    parsed = run()
    for section in SECTIONS:
        assert parsed.get(section) == section()
    assert parsed.explicit == frozenset()
    assert parsed.differences() == {}


@pytest.mark.parametrize(
    "argv", [["--micro-batch-size", "4"], ["--micro_batch_size", "4"], ["--micro-batch_size=4"], ["--micro_batch_size=4"]]
)
def test_spellings_of_a_flag(argv: list[str]) -> None:
    parsed = run(*argv)
    assert parsed.get(TrainingConfig).micro_batch_size == 4
    assert parsed.explicit == {"micro_batch_size"}
    assert parsed.differences() == {"micro_batch_size": 4}


@pytest.mark.parametrize("key", ["micro_batch_size", "micro-batch-size", "micro-batch_size"])
def test_spellings_of_a_yaml_key(tmp_path: Path, key: str) -> None:
    for text in (f"{key}: 4\n", f"training:\n  {key}: 4\n"):
        assert run("--config", yaml_file(tmp_path, text)).get(TrainingConfig).micro_batch_size == 4


@pytest.mark.parametrize(("text", "value"), [("200000000", 2 * 10**8), ("2e8", 2 * 10**8), ("1_000", 1000), ("2.5e3", 2500), ("-3", -3)])
def test_integers(tmp_path: Path, text: str, value: int) -> None:
    from_flag = run("--seed", text).get(TrainingConfig).seed
    from_yaml = run("--config", yaml_file(tmp_path, f"seed: {text}")).get(TrainingConfig).seed
    assert (from_flag, from_yaml) == (value, value)
    assert type(from_flag) is type(from_yaml) is int


@pytest.mark.parametrize("text", ["1.5", "1e-1", "abc", "", "1e999", "1e17", "nan", "true"])
def test_no_integers(tmp_path: Path, text: str) -> None:
    [problem] = refusal(f"--seed={text}")
    assert problem == f"--seed: got {text}, expected an integer such as 4, 1_000 or 2e8; correct the value"
    [problem] = refusal("--config", yaml_file(tmp_path, f"bf16: true\nseed: '{text}'\n"))
    assert "run.yaml:2 seed: got" in problem


def test_floats(tmp_path: Path) -> None:
    assert run("--lr", "3e-4").get(OptimizerConfig).lr == 3e-4
    assert run("--lr", "1").get(OptimizerConfig).lr == 1.0
    # A YAML 1.1 reader takes 3e-4 for text: no dot.
    assert run("--config", yaml_file(tmp_path, "lr: 3e-4\nmin_lr: 1.0e-5\n")).get(OptimizerConfig) == OptimizerConfig(lr=3e-4, min_lr=1e-5)
    for text in ("nan", "inf", "-inf", "1e999", "fast"):
        assert refusal("--lr", text) == [f"--lr: got {text}, expected a number such as 0.1 or 3e-4; correct the value"]


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--progress-bar"], True),
        (["--progress-bar", "true"], True),
        (["--progress_bar=yes"], True),
        (["--no-progress-bar"], False),
        (["--no_progress_bar"], False),
        (["--progress-bar", "False"], False),
        (["--progress-bar=off"], False),
    ],
)
def test_booleans_on_the_command_line(argv: list[str], value: bool) -> None:
    parsed = run("--seed", "1", *argv, "--lr", "1")
    assert parsed.get(LogConfig).progress_bar is value
    assert parsed.explicit == {"seed", "progress_bar", "lr"}


def test_booleans_in_yaml(tmp_path: Path) -> None:
    parsed = run("--config", yaml_file(tmp_path, "bf16: true\nsequence_parallel: yes\nprogress_bar: false\n"))
    assert parsed.differences() == {"bf16": True, "sequence_parallel": True, "progress_bar": False}
    [problem] = refusal("--config", yaml_file(tmp_path, "bf16: 7\n"))
    assert problem.endswith("run.yaml:1 bf16: got 7, expected true or false; correct the value")
    assert refusal("--bf16", "maybe") == ["--bf16: got maybe, expected true or false; correct the value"]
    assert refusal("--no-bf16", "true") == ["--no-bf16: got true, expected no value; give --no-bf16 or --bf16 true|false"]


def test_choices() -> None:
    assert run("--lr-decay-style", "cosine").get(OptimizerConfig).lr_decay_style == "cosine"
    [problem] = refusal("--lr-decay-style", "cosin")
    assert problem == "--lr-decay-style: got cosin, expected one of constant, linear, cosine, WSD; did you mean cosine?"


def test_optional_text(tmp_path: Path) -> None:
    assert run("--data-path", "corpus/a b").get(DataConfig).data_path == ("corpus/a b",)
    assert run("--data-path=--odd").get(DataConfig).data_path == ("--odd",)
    parsed = run("--config", yaml_file(tmp_path, "data_path: 007\nsave: null\nload: ~\nsplit: 969,30,1\n"))
    assert parsed.get(DataConfig) == DataConfig(data_path=("007",))
    assert parsed.get(CheckpointConfig).save is None
    assert parsed.explicit == {"data_path", "save", "load", "split"}
    [problem] = refusal("--config", yaml_file(tmp_path, "split: null\n"))
    assert "run.yaml:1 split: got null, expected text" in problem


def test_optional_integers(tmp_path: Path) -> None:
    assert run("--eos-token-id", "2").get(ModelConfig).eos_token_id == 2
    path = yaml_file(tmp_path, "eos_token_id: 2\n")
    assert run("--config", path, "--eos-token-id", "null").get(ModelConfig).eos_token_id is None
    [problem] = refusal("--eos-token-id", "</s>")
    assert problem == "--eos-token-id: got </s>, expected an integer such as 4, 1_000 or 2e8 or null; correct the value"


def test_mappings(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert run("--rope-scaling", json.dumps(scaling)).get(ModelConfig).rope_scaling == scaling
    text = "model:\n  rope_scaling:\n    rope_type: linear\n    factor: 2.0\n"
    assert run("--config", yaml_file(tmp_path, text)).get(ModelConfig).rope_scaling == scaling
    assert run("--config", yaml_file(tmp_path, text), "--rope-scaling", "null").get(ModelConfig).rope_scaling is None
    for wrong in ("linear", "[1]", "{"):
        [problem] = refusal("--rope-scaling", wrong)
        assert problem.startswith(f"--rope-scaling: got {wrong}, expected a mapping (on the command line JSON")


def test_several_words(tmp_path: Path) -> None:
    sections = [GenerateConfig]
    parsed = run("--load", "run", "--prompt", "Once upon", "a time", "-1", "--temperature", "-0.5", "--greedy", sections=sections)
    assert parsed.get(GenerateConfig) == GenerateConfig("run", ("Once upon", "a time", "-1"), -0.5, True)
    parsed = run("--load=run", "--prompt=--x", sections=sections)
    assert parsed.get(GenerateConfig).prompt == ("--x",)
    parsed = run("--config", yaml_file(tmp_path, "load: run\ngenerate: {prompt: [a, 'b c']}\n"), sections=sections)
    assert parsed.get(GenerateConfig).prompt == ("a", "b c")
    parsed = run("--config", yaml_file(tmp_path, "load: run\nprompt: a b\n"), sections=sections)
    assert parsed.get(GenerateConfig).prompt == ("a b",)
    assert refusal("--load", "run", "--prompt", sections=sections) == [
        "--prompt: got nothing, expected one or more, separated by spaces: text; correct the value"
    ]


def test_several_integers(tmp_path: Path) -> None:
    assert run("--pipeline-layer-split", "3", "1").get(ParallelConfig).pipeline_layer_split == (3, 1)
    parsed = run("--config", yaml_file(tmp_path, "pipeline_layer_split: [3, 1_0]\n"))
    assert parsed.get(ParallelConfig).pipeline_layer_split == (3, 10)
    expected = "expected one or more, separated by spaces: an integer such as 4, 1_000 or 2e8"
    assert refusal("--pipeline-layer-split", "x") == [f"--pipeline-layer-split: got x, {expected}; correct the value"]
    for given in (["3,1"], ["3,", "1"], ["3 1"]):
        assert refusal("--pipeline-layer-split", *given) == [
            f"--pipeline-layer-split: got {' '.join(given)}, {expected}; separate them by spaces: --pipeline-layer-split 3 1"
        ]
    for text in ("3,1", "3 1", "'3, 1'"):
        [problem] = refusal("--config", yaml_file(tmp_path, f"pipeline_layer_split: {text}\n"))
        assert problem.endswith("; write [3, 1]")
    assert refusal("--pipeline-layer-split", "3", "x") == [f"--pipeline-layer-split: got 3 x, {expected}; correct the value"]


@pytest.mark.parametrize("given", ["\n  - embed*: lr=1e-3, weight_decay=0", "\n  - embed*: 3\n  - a", "{'embed*': 3}"])
def test_a_text_with_a_colon_needs_quotes(given: str, tmp_path: Path) -> None:
    [problem] = refusal("--config", yaml_file(tmp_path, f"param_group: {given}\n"))
    assert "param_group: got " in problem and problem.endswith("; put a text with a colon in it in quotes")
    [problem] = refusal("--config", yaml_file(tmp_path, "param_group: [a, null]\n"))
    assert problem.endswith("; correct the value")


def test_several_patterns(tmp_path: Path) -> None:
    assert run("--freeze", "model.embed_tokens.*", "*norm*").get(OptimizerConfig).freeze == ("model.embed_tokens.*", "*norm*")
    parsed = run("--config", yaml_file(tmp_path, "freeze: ['*.mlp.*', model.norm.weight]\n"))
    assert parsed.get(OptimizerConfig).freeze == ("*.mlp.*", "model.norm.weight")
    assert run().get(OptimizerConfig).freeze == ()


def test_groups_of_parameters_are_collected(tmp_path: Path) -> None:
    """In a file they are one list, which those of the command line replace."""
    parsed = run("--param-group", "a*: lr=1", "b: lr=2", "--lr", "3", "--param-group", "a*: lr=1")
    assert parsed.get(OptimizerConfig).param_group == ("a*: lr=1", "b: lr=2", "a*: lr=1") and parsed.notes == ()
    file = yaml_file(tmp_path, "param_group: ['a*: lr=1, weight_decay=0', 'b: lr=2']\n")
    assert run("--config", file).get(OptimizerConfig).param_group == ("a*: lr=1, weight_decay=0", "b: lr=2")
    assert run("--config", file, "--param-group", "c: lr=1").get(OptimizerConfig).param_group == ("c: lr=1",)


def test_pipeline_and_precision_flags_of_megatron() -> None:
    parsed = run("--num-virtual-stages-per-pipeline-rank", "2", "--fp16", "--initial-loss-scale", "4096")
    assert parsed.get(ParallelConfig) == ParallelConfig(virtual_pipeline_model_parallel_size=2)
    assert parsed.get(TrainingConfig) == TrainingConfig(fp16=True, initial_loss_scale=4096.0)


def test_required_options_and_one_word_options() -> None:
    sections = [GenerateConfig]
    assert refusal(sections=sections) == ["--load: got nothing, expected text; give --load"]
    # Given wrongly is one problem, not two.
    assert refusal("--load", sections=sections) == ["--load: got nothing, expected text; write --load VALUE"]
    [problem] = refusal("--load", "my", "run", sections=sections)
    assert problem == "--load: got 2 words: my run, expected text; quote text that has spaces"


def test_a_command_knows_only_its_own_options_and_aliases() -> None:
    assert refusal("--load", "x", "--num-layers", "4", sections=[GenerateConfig]) == [
        "--num-layers: got an unknown flag, expected an option of this command; --help lists the options"
    ]


def test_flags_win_over_yaml(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: 1.0\nmin_lr: 0.5\nmodel: llama3-8b\n")
    parsed = run("--lr", "2", "--config", path, "--preset", "llama2-7b")
    assert parsed.get(OptimizerConfig) == OptimizerConfig(lr=2.0, min_lr=0.5)
    assert parsed.get(ModelConfig).preset == "llama2-7b"
    assert dict(parsed.sources) == {"lr": "--lr", "min_lr": f"{path}:2 min_lr", "preset": "--preset"}


def test_a_default_that_is_restated_is_explicit() -> None:
    parsed = run("--lr", "3e-4")
    assert parsed.explicit == {"lr"}
    assert parsed.differences() == {}


def test_differences_of_instances() -> None:
    assert differences([OptimizerConfig(lr=1.0), LaunchConfig(nodes=2)]) == {"lr": 1.0, "nodes": 2}


def test_groups_in_yaml(tmp_path: Path) -> None:
    text = """
model: {preset: llama3-8b, num-layers: 4}
parallel:
  tensor-model-parallel-size: 2
launch: {nodes: 2, gpus_per_node: 8}
optimizer: {}
seq_length: 128
"""
    parsed = run("--config", yaml_file(tmp_path, text))
    assert parsed.get(ModelConfig) == ModelConfig(preset="llama3-8b", num_hidden_layers=4)
    assert parsed.get(ParallelConfig) == ParallelConfig(tensor_model_parallel_size=2)
    assert parsed.get(LaunchConfig) == LaunchConfig(nodes=2, gpus_per_node=8)
    assert parsed.get(TrainingConfig) == TrainingConfig(seq_length=128)
    path = yaml_file(tmp_path, "training:\n  seq_length: 8\n  lr: 1\n  rotary-base: 1\n  sequence_parallel_: true\n")
    assert refusal("--config", path) == [
        f"{path}:3 lr: got it under training:, expected it under optimizer: or at the top; move it",
        f"{path}:4 rotary-base: got it under training:, expected it under model: or at the top; move it",
        f"{path}:5 sequence_parallel_: got an unknown key, expected an option of this command; did you mean sequence_parallel?",
    ]


UNKNOWN = "got an unknown flag, expected an option of this command"


def test_unknown_names_are_answered_with_what_is_near(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "# comment\nmicro_batchsize: 4\nfrobnicate: 1\noptimiser: {lr: 1}\ntraining: 3\n")
    unknown = "got an unknown key, expected an option of this command"
    assert refusal("--config", path) == [
        f"{path}:2 micro_batchsize: {unknown}; did you mean micro_batch_size?",
        f"{path}:3 frobnicate: {unknown}; --help lists the options; docs/migrating.md has the names of other trainers",
        f"{path}:4 optimiser: {unknown}; did you mean optimizer?",
        f"{path}:5 training: {unknown}; write its options below it, as in training: {{option: value}}",
    ]
    assert refusal("--num-layer", "4", "--lr-warmup", "3", "--bf-16", "--batch-size", "8", "--l", "1") == [
        f"--num-layer: {UNKNOWN}; did you mean --num-layers?",
        f"--lr-warmup: {UNKNOWN}; did you mean --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction?",
        f"--bf-16: {UNKNOWN}; did you mean --bf16?",
        f"--batch-size: {UNKNOWN}; did you mean --micro-batch-size, --global-batch-size or --rampup-batch-size?",
        f"--l: {UNKNOWN}; --help lists the options; docs/migrating.md has the names of other trainers",
    ]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("zero-stage", "give --data-parallel-sharding-strategy optim (stage 1), optim_grads (2) or optim_grads_params (3)"),
        ("learning_rate", "give --lr"),
        ("training.seq_len", "give --seq-length"),
        ("data_seed", "give --seed"),
        ("dataloader-num-workers", "leave it out: datasets are memory-mapped"),
        ("nproc_per_node", "it is torchrun's: write it before -m megatron_llama"),
        ("fp8-format", "FP8 is not written here: leave its options out and train with --bf16"),
        ("dpo-beta", "the command `align` tunes on preferences"),
        ("cpo_alpha", "give --sft-loss-weight (the command `align`)"),
        ("precompute-ref-log-probs", "leave it out: the reference is always scored before the first step"),
    ],
)
def test_names_of_other_trainers(name: str, remedy: str, tmp_path: Path) -> None:
    """They are answered with ours, never with a name that only looks like them."""
    assert refusal(f"--{name}", "1") == [f"--{name}: {UNKNOWN}; {remedy} (docs/migrating.md)"]
    [problem] = refusal("--config", yaml_file(tmp_path, f"{name}: 1\n"))
    assert problem.endswith(f"; {remedy} (docs/migrating.md)")


def test_what_is_said_of_foreign_names_is_true() -> None:
    known = options_of((AlignConfig, SFTConfig, *SECTIONS)).keys() | MEGATRON.keys()
    foreign = {*INSTEAD, *NOT_NEEDED, *FAMILIES}
    assert not foreign & known, "a name that is known is never looked up"
    said = " ".join([*INSTEAD.values(), *NOT_NEEDED.values(), *FAMILIES.values()])
    assert {name.replace("-", "_") for name in re.findall(r"--([a-z0-9-]+)", said)} <= known


def test_options_of_other_commands_are_named_with_them() -> None:
    owners = {"train_iters": ["pretrain", "sft"], "prompt": ["generate"]}
    with pytest.raises(ConfigError, match=r"--train-iters: got an unknown flag, .*; pretrain and sft have --train-iters$"):
        parse(["--load=x", "--train-iters", "3"], [GenerateConfig], aliases=MEGATRON, owners=lambda name: owners.get(name, ()))
    with pytest.raises(ConfigError, match=r"; did you mean --sample-prompt\? generate has --prompt$"):
        parse(["--prompt", "3"], SECTIONS, aliases=MEGATRON, owners=lambda name: owners.get(name, ()))


def test_words_without_a_flag() -> None:
    expected = "expected --option value; write a flag before it (flags start with two dashes)"
    assert refusal("train", "-lr", "3") == [f"command line: got train -lr 3, {expected}"]
    assert refusal("--lr=3", "4", "--seed", "1") == [f"command line: got 4, {expected}"]


def test_of_a_repeated_flag_the_last_one_counts() -> None:
    parsed = run(
        "--lr", "1", "--num-layers=4", "--bf16", "--data-path", "a", "b", "--lr", "2", "--no-bf16", "--data-path", "c", "--lr", "3"
    )
    assert parsed.get(OptimizerConfig).lr == 3.0
    assert parsed.get(TrainingConfig).bf16 is False
    assert parsed.get(DataConfig).data_path == ("c",)
    assert parsed.sources["bf16"] == "--no-bf16"
    assert parsed.notes == (
        "--lr 2.0 replaces --lr 1.0, which stands before it",
        "--no-bf16 false replaces --bf16 true, which stands before it",
        "--data-path c replaces --data-path a b, which stands before it: give several values after one --data-path",
        "--lr 3.0 replaces --lr 2.0, which stands before it",
    )
    parsed = run("--num-layers", "4", "--num-hidden-layers", "5")
    assert parsed.get(ModelConfig).num_hidden_layers == 5 and len(parsed.notes) == 1
    same = run("--lr", "1", "--lr", "1.0", "--num-layers", "4", "--num-hidden-layers", "4")
    assert same.notes == ()
    problems = refusal("--lr", "1", "--lr", "fast")
    assert problems == ["--lr: got fast, expected a number such as 0.1 or 3e-4; correct the value"]


def test_a_file_says_everything_once(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "num_layers: 4\nmodel:\n  num-hidden-layers: 5\nlr: 1\nlr: 2\n")
    assert refusal("--config", path) == [
        f"{path}:3 num-hidden-layers: got 5 after 4 ({path}:1 num_layers), expected one value of num_hidden_layers; give it once",
        f"{path}:5 lr: got 2.0 after 1.0 ({path}:4 lr), expected one value of lr; give it once",
    ]
    path = yaml_file(tmp_path, "model:\n  rope_scaling:\n    factor: 8.0\n    rope_type: linear\n    factor: 2.0\n")
    assert refusal("--config", path) == [f"{path}:5 factor: got it again after line 3, expected one value of factor; give it once"]
    path = yaml_file(tmp_path, "rope_scaling: {factor: 8.0, rope_type: linear, factor: 8.0}\n")
    assert refusal("--config", path) == [f"{path}:1 factor: got it again after line 1, expected one value of factor; give it once"]
    [problem] = refusal("--rope-scaling", '{"rope_type": "linear", "factor": 8.0, "factor": 2.0}')
    assert problem.endswith("; factor stands there twice: give it once")


def test_an_empty_section_is_no_problem(tmp_path: Path) -> None:
    assert run("--config", yaml_file(tmp_path, "training:\noptimizer:\nmodel:\nlora:\nseed: 3\n")).explicit == {"seed"}


def test_megatron_names() -> None:
    argv = (
        "--model llama3-8b --num-layers 4 --ffn-hidden-size 64 --num-query-groups 2 --group-query-attention --norm-epsilon 1e-6 "
        "--rotary-base 500000 --init-method-std 0.01 --untie-embeddings-and-output-weights --tokenizer-name-or-path t.model "
        "--overlapped-distributed-optimizer --swiglu --use-rotary-position-embeddings --no-position-embedding --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0.0 --RMSNorm --causal-lm "
        "--use-flash-attn --no-gradient-accumulation-fusion --data-impl mmap --override-opt_param-scheduler --recompute-activations "
        "--recompute-granularity selective --dataloader-type cyclic --tokenizer-type PretrainedFromHF --no-load-optim --finetune"
    )
    parsed = run(*argv.split())
    model = ModelConfig(
        preset="llama3-8b",
        num_hidden_layers=4,
        intermediate_size=64,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        initializer_range=0.01,
    )
    assert parsed.get(ModelConfig) == model
    assert parsed.get(DataConfig) == DataConfig(tokenizer_model="t.model", tokenizer_type="PretrainedFromHF")
    assert parsed.get(ParallelConfig) == ParallelConfig(
        data_parallel_sharding_strategy="optim_grads", reduce_bucket_size=500_000_000, recompute_granularity="selective"
    )
    assert parsed.get(CheckpointConfig) == CheckpointConfig(finetune=True, load_optim=False)
    assert "data_order" in parsed.explicit
    assert "tie_word_embeddings" in parsed.explicit
    assert run("--layernorm-epsilon", "1e-6").get(ModelConfig).rms_norm_eps == 1e-6
    strategy = run("--use-distributed-optimizer").get(ParallelConfig).data_parallel_sharding_strategy
    assert strategy == "optim"


def test_what_a_megatron_switch_implies_loses_to_what_is_given(tmp_path: Path) -> None:
    switch = "--overlapped-distributed-optimizer"
    assert run(switch, "--reduce-bucket-size=2e8").get(ParallelConfig).reduce_bucket_size == 2 * 10**8
    path = yaml_file(tmp_path, "reduce_bucket_size: 1e8\n")
    assert run("--config", path, switch).get(ParallelConfig).reduce_bucket_size == 10**8
    assert run("--use-distributed-optimizer").get(ParallelConfig).reduce_bucket_size == ParallelConfig().reduce_bucket_size
    path = yaml_file(tmp_path, "overlapped_distributed_optimizer: true\n")
    replaced = run("--config", path, "--data-parallel-sharding-strategy", "optim").get(ParallelConfig)
    assert replaced.reduce_bucket_size == ParallelConfig().reduce_bucket_size


def test_what_is_accepted_and_changes_nothing_is_said() -> None:
    parsed = run("--RMSNorm", "--data-impl=mmap", "--use-flash-attn", "--recompute-activations")
    assert parsed.notes == (
        "--RMSNorm: every LLaMA has it: accepted, changes nothing",
        "--data-impl: datasets are always memory-mapped: accepted, changes nothing",
        "--use-flash-attn: --attention-backend decides, and auto takes cuDNN's or the flash kernels: accepted, changes nothing",
    )
    assert run("--bf16").notes == ()


def test_flags_of_megatron_lm_that_are_not_needed() -> None:
    """Those of its scripts for LLaMA and GPT; each is said to change nothing."""
    flags = (
        "--num-workers 8 --log-throughput --use-checkpoint-args --manual-gc --manual-gc-interval 100 --DDP-impl local "
        "--use-mcore-models --transformer-impl transformer_engine --attention-softmax-in-fp32 "
        "--no-masked-softmax-fusion --no-rope-fusion --cross-entropy-loss-fusion --calculate-per-token-loss --empty-unused-memory-level 1 "
        "--no-async-tensor-model-parallel-allreduce --overlap-grad-reduce --overlap-param-gather --distributed-backend nccl "
        "--use-contiguous-parameters-in-local-ddp --no-create-attention-mask-in-dataloader --no-mmap-bin-files "
        "--ckpt-format torch_dist --no-save-rng --no-load-rng --exit-on-missing-checkpoint --use-pytorch-profiler "
        "--recompute-method block --rerun-mode disabled --timing-log-level 2 --log-params-norm --exit-signal-handler --local-rank 0"
    )
    parsed = run(*flags.split())
    assert parsed.differences() == {}
    said = [flag for note in parsed.notes for flag in note.split(":")[0].split(", ")]
    assert sorted(said) == sorted(word for word in flags.split() if word.startswith("--"))
    assert len(parsed.notes) < 20, "what has the same reason is on one line"
    assert run("--attention-backend", "fused", "--deterministic-mode").differences() == {
        "attention_backend": "fused",
        "deterministic_mode": True,
    }
    used = run("--kv-channels", "128", "--use-torch-fsdp2", "--ddp-bucket-size", "1000", "--accumulate-allreduce-grads-in-fp32")
    other = run("--rotary-percent", "0.5", "--qk-layernorm", "--apply-layernorm-1p", "--add-qkv-bias")
    assert other.differences() == {"partial_rotary_factor": 0.5, "qk_norm": "head", "apply_layernorm_1p": True, "add_qkv_bias": True}
    assert used.differences() == {"head_dim": 128, "data_parallel_sharding_strategy": "optim_grads_params", "reduce_bucket_size": 1000}
    # They are Megatron's: `preprocess --num-workers 4` asks for something.
    assert refusal("--load=x", "--num-workers", "4", sections=[GenerateConfig]) == [f"--num-workers: {UNKNOWN}; --help lists the options"]


def test_megatron_switches_in_yaml(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "untie_embeddings_and_output_weights: false\nswiglu: true\nattention-dropout: 0.0\n")
    parsed = run("--config", path)
    assert parsed.differences() == {"tie_word_embeddings": True}
    assert parsed.explicit == {"tie_word_embeddings"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--swiglu false", "--swiglu: got false, expected true; every LLaMA has it: leave it out"),
        ("--swiglu perhaps", "--swiglu: got perhaps, expected true or false; correct the value"),
        ("--normalization LayerNorm", "--normalization: got LayerNorm, expected RMSNorm; every LLaMA has it: leave it out"),
        ("--normalization", "--normalization: got nothing, expected text; write --normalization VALUE"),
        ("--position-embedding-type learned_absolute", "got learned_absolute, expected rope; every"),
        ("--hidden-dropout 0.1", "--hidden-dropout: got 0.1, expected 0; LLaMA is trained without dropout"),
        ("--attention-dropout none", "--attention-dropout: got none, expected 0; LLaMA is trained without dropout"),
        ("--use-distributed-optimizer false", "got false, expected true; leave it out and set --data-parallel-sharding-strategy"),
        ("--RMSNorm false", "--RMSNorm: got false, expected true; every LLaMA"),
        ("--data-impl lazy", "--data-impl: got lazy, expected mmap; datasets are always memory-mapped"),
        ("--dataloader-type external", "--dataloader-type: got external, expected cyclic or single; Megatron shuffles"),
        ("--tokenizer-type NullTokenizer", "HuggingFaceTokenizer, PretrainedFromHF; correct the value"),
        ("--tokenizer-type GPT2BPETokenizer", "--tokenizer-type: got GPT2BPETokenizer, expected one of SentencePieceTokenizer, Llama2"),
        ("--recompute-activations --recompute-granularity full", "got full after selective (--recompute-activations)"),
        ("--num-layers many", "--num-layers: got many, expected an integer"),
        ("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", "got true after false (--accumulate-allreduce-grads-in-fp32)"),
        ("--rotary-percent half", "--rotary-percent: got half, expected a number"),
        ("--recompute-method uniform", "--recompute-method: got uniform, expected block; "),
        ("--optimizer sgd", "--optimizer: got sgd, expected one of adam, muon, schedule_free_adamw"),
        ("--use-distributed-optimizer --overlapped-distributed-optimizer", "got optim_grads after optim (--use-distributed-optimizer)"),
    ],
)
def test_megatron_refusals(argv: str, message: str) -> None:
    [problem] = refusal(*argv.split())
    assert message in problem and ": accepted" not in problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    [problem] = refusal("--config", str(tmp_path / "none.yaml"))
    assert problem.startswith(f"--config {tmp_path}/none.yaml: got") and problem.endswith("expected a readable YAML file; check the path")
    [problem] = refusal("--config", str(tmp_path))
    assert "a readable YAML file" in problem
    (tmp_path / "run.yaml").write_bytes(b"lr: \xff\n")
    [problem] = refusal("--config", str(tmp_path / "run.yaml"))
    assert "a readable YAML file" in problem
    path = yaml_file(tmp_path, "lr: 1\nseed: [1\nbf16: true\n")
    [problem] = refusal("--config", path)
    assert problem.startswith(f"{path}:3: got ") and "expected valid YAML" in problem
    path = yaml_file(tmp_path, "\n- lr\n")
    [problem] = refusal("--config", path)
    assert problem.startswith(f"{path}:2: got ") and "key: value" in problem
    assert run("--config", yaml_file(tmp_path, "# only a comment\n")).explicit == frozenset()


@pytest.mark.parametrize("argv", [["--config"], ["--config", "a", "b"], ["--config", "a", "--config", "b"]])
def test_one_configuration_file(argv: list[str]) -> None:
    [problem] = refusal(*argv)
    assert problem.startswith("--config: got ") and problem.endswith("expected one YAML file; give --config FILE once")


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: fast\nbogus: 1\n")
    problems = refusal("stray", "--config", path, "--seed", "x", "--no-swiglu", "--num-layer", "2")
    assert len(problems) == 6


def test_help_names_every_option() -> None:
    text = help_text("python -m x pretrain", "Train a model.", SECTIONS)
    assert text.startswith("usage: python -m x pretrain\n\nTrain a model.\n")
    for name, option in options_of(SECTIONS).items():
        assert f"\n  {option.flag}" in text, name
    assert "--lr-decay-style constant|linear|cosine|WSD  (default: linear)" in text
    assert "\noptimizer: The update rule, learning-rate schedule, clipping.\n" in text
    assert max(map(len, text.splitlines())) <= 140
    assert not re.search(r"-$", text, re.MULTILINE), "a flag is broken at a hyphen"
    assert "--lora-target-modules TEXT ...  (default: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj)" in text
    assert "--profile-ranks INT ...  (default: 0)" in text
    assert "--load TEXT  (required)" in help_text("generate", "Continue a text.", [GenerateConfig])


def test_reading_options_loads_nothing_slow() -> None:
    code = (
        "import sys; from megatron_llama.config.parse import parse; from megatron_llama.config.megatron_names import MEGATRON;"
        "from megatron_llama.config.help import help_text; from megatron_llama.config.sections import config_sections; s = config_sections();"
        "parse(['--lr', '1'], s, aliases=MEGATRON); help_text('pretrain', '', s);"
        "print([m for m in ('torch', 'numpy', 'yaml', 'argparse', 'json', 'difflib', 'tqdm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_literals_are_held_by_annotations() -> None:
    # A reader of the manual sees the choices; they come from the annotation, not from a second list.
    assert options_of([ParallelConfig])["pipeline_schedule"].kind == Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nlr: \0\n", r"run\.yaml:2: got unacceptable character #x0000: special characters are not allowed"),
        (
            "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
            "values, those of aliases counted",
        ),
        ("a: &a [x, *a]\n", r"run\.yaml:1: got a value that contains itself"),
        (f"a: {'[' * 5000}\n", r"run\.yaml:1: got lists within each other, more than 20"),
        ("rope_scaling: {a: 2020-99-99}\n", r"run\.yaml: got month must be in 1\.\.12"),
        (f"rope_scaling: {{a: {'9' * 5000}}}\n", r"run\.yaml: got Exceeds the limit"),
        ("? [seed, lr]\n: 1\n", r"run\.yaml:1"),
        ("x" * 600_000, r"--config .*run\.yaml: got more than 524,288 characters"),
        (f"seed: {'9' * 5000}\n", r"run\.yaml:1 seed: got 9{400}\.\.\., expected an integer"),
        ("seed: 9223372036854775808\n", r"run\.yaml:1 seed: got 9223372036854775808, expected an integer"),
        (f"rope_scaling: '{'[' * 100_000}'\n", r"run\.yaml:1 rope_scaling: got \[{400}\.\.\."),
        ("data_path: [1e999999999, x, 1, y]\n", "got 1e999999999 x 1 y, expected PREFIX"),
    ],
    ids=["nul", "aliases", "itself", "depth", "date", "digits", "strange key", "size", "long number", "int64", "deep json", "weight"],
)
def test_a_file_that_would_take_the_machine_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        run("--config", yaml_file(tmp_path, text))
        raise ConfigError("; ".join(blend_problems(["1e999999999", "x", "1", "y"])))
    assert len(str(refused.value)) < 3000


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="--config /dev/zero: got more than 524,288 characters"):
        run("--config", "/dev/zero")


def test_aliases_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train_data: &files [a.jsonl, b.jsonl]\nvalid_data: *files\n")
    parsed = run("--config", path, sections=[*SECTIONS, SFTConfig]).get(SFTConfig)
    assert parsed.train_data == parsed.valid_data == ("a.jsonl", "b.jsonl")
