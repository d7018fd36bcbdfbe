import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from megatron_llama import cli
from megatron_llama.config.blend import blend_problems
from megatron_llama.config.foreign_names import FAMILIES, INSTEAD, NOT_NEEDED
from megatron_llama.config.help import field_docs, help_text, main, options_markdown
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import Parsed, options_of, parse
from megatron_llama.config.schema import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ConfigError
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.sft.sft_config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = config_sections()
QUOTE = "'"
UNKNOWN, KEY = (f"got an unknown {what}, expected an option of this command" for what in ("flag", "key"))
STRAY = "expected --option value; write a flag before it (flags start with two dashes)"

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


SPLIT = "one or more, separated by spaces: an integer such as 4, 1_000 or 2e8"
INTEGER, NUMBER = "an integer such as 4, 1_000 or 2e8", "a number such as 0.1 or 3e-4"
NO_INTEGERS = ("1.5", "1e-1", "abc", "", "1e999", "1e17", "nan", "true")
ONCE = "expected one value of factor; give it once"
SCALING = {"rope_type": "linear", "factor": 2.0}
READ: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"micro_batch_size": 4}, ("--micro-batch-size 4", "--micro_batch_size 4", "--micro-batch-size=4", "--micro_batch_size=4")),
    ({"micro_batch_size": 4}, ("micro_batch_size: 4", "micro-batch-size: 4", "training:\n  micro-batch_size: 4")),
    ({"seed": 2 * 10**8}, ("--seed 200000000", "--seed 2e8", "seed: 2e8")),
    ({"seed": 2500}, ("--seed 2.5e3", "seed: 2.5e3", "--seed 2_500", "seed: 2_500")),
    ({"seed": -3}, ("--seed -3", "seed: -3")),
    ({"lr": 1.0}, ("--lr 1",)),
    ({"lr": 2e-4, "min_lr": 1e-5}, ("lr: 2e-4\nmin_lr: 1.0e-5",)),  # a YAML 1.1 reader takes 2e-4 for text: no dot
    ({"lr": 1.0, "bf16": True}, ("--bf16 --lr 1", "--bf16 true --lr 1", "--bf16=yes --lr 1", "bf16: yes\nlr: 1")),
    ({"progress_bar": False}, ("--no-progress-bar", "--no_progress_bar", "--progress-bar False", "--progress-bar=off", "progress_bar: false")),
    ({"lr_decay_style": "cosine"}, ("--lr-decay-style cosine",)),
    ({"data_path": ("corpus/a b",)}, ("--data-path 'corpus/a b'",)),
    ({"data_path": ("--odd",)}, ("--data-path=--odd",)),
    ({"data_path": ("007",)}, ("data_path: 007\nsave: null\nload: ~\nsplit: 969,30,1",)),
    ({"eos_token_id": 2}, ("--eos-token-id 2", "eos_token_id: 2")),
    ({"rope_scaling": SCALING}, (f"--rope-scaling '{json.dumps(SCALING)}'", "model:\n  rope_scaling:\n    rope_type: linear\n    factor: 2.0")),
    ({"pipeline_layer_split": (3, 10)}, ("--pipeline-layer-split 3 10", "pipeline_layer_split: [3, 1_0]")),
    ({"freeze": ("*.mlp.*", "*norm*")}, ("--freeze *.mlp.* *norm*", "freeze: ['*.mlp.*', '*norm*']")),
    ({"lr": 3.0, "param_group": ("a*: lr=1", "b: lr=2", "c: lr=1")}, ("--param-group 'a*: lr=1' 'b: lr=2' --lr 3 --param-group 'c: lr=1'",)),
    ({"param_group": ("a*: lr=1, weight_decay=0", "b: lr=2")}, ("param_group: ['a*: lr=1, weight_decay=0', 'b: lr=2']",)),
    (
        {"virtual_pipeline_model_parallel_size": 2, "fp16": True, "initial_loss_scale": 4096.0},
        ("--num-virtual-stages-per-pipeline-rank 2 --fp16 --initial-loss-scale 4096",),
    ),
    (
        {"preset": "llama3-8b", "num_hidden_layers": 4, "tensor_model_parallel_size": 2, "nodes": 2, "gpus_per_node": 8, "seq_length": 128},
        (
            "model: {preset: llama3-8b, num-layers: 4}\nparallel:\n  tensor-model-parallel-size: 2\n"
            "launch: {nodes: 2, gpus_per_node: 8}\noptimizer: {}\nseq_length: 128",
        ),
    ),
    ({"seed": 3}, ("training:\noptimizer:\nmodel:\nlora:\nseed: 3",)),
    ({"tie_word_embeddings": True}, ("untie_embeddings_and_output_weights: false\nswiglu: true\nattention-dropout: 0.0",)),
    ({}, ("# only a comment", "--lr 3e-4")),
]  # fmt: skip
"""What differs from the defaults, and command lines and files that say so."""


def given(text: str, folder: Path) -> list[str]:
    return shlex.split(text) if text.startswith("-") else ["--config", yaml_file(folder, text + "\n")]


@pytest.mark.parametrize(("expected", "texts"), READ)
def test_what_is_read(expected: dict[str, Any], texts: tuple[str, ...], tmp_path: Path) -> None:
    for text in texts:
        parsed = run(*given(text, tmp_path))
        found = parsed.differences()
        assert found == expected and parsed.explicit >= found.keys() and (parsed.notes == () or "swiglu" in text)
        assert [type(found[name]) for name in found] == [type(expected[name]) for name in found]


def test_what_is_given_counts_though_it_is_the_default(tmp_path: Path) -> None:
    assert run("--lr", "3e-4").explicit == {"lr"} and run().explicit == frozenset()
    file = yaml_file(tmp_path, "data_path: x\nsave: null\nload: ~\nsplit: 969,30,1\n")
    assert run("--config", file).explicit == {"data_path", "save", "load", "split"}


def test_several_words(tmp_path: Path) -> None:
    sections = [GenerateConfig]
    parsed = run("--load", "run", "--prompt", "Once upon", "a time", "-1", "--temperature", "-0.5", "--greedy", sections=sections)
    assert parsed.get(GenerateConfig) == GenerateConfig("run", ("Once upon", "a time", "-1"), -0.5, True)
    assert run("--load=run", "--prompt=--x", sections=sections).get(GenerateConfig).prompt == ("--x",)
    for text, prompt in (("load: run\ngenerate: {prompt: [a, 'b c']}\n", ("a", "b c")), ("load: run\nprompt: a b\n", ("a b",))):
        assert run("--config", yaml_file(tmp_path, text), sections=sections).get(GenerateConfig).prompt == prompt


REFUSED: list[tuple[str, tuple[str, ...]]] = [
    *((f"--seed={text}", (f"--seed: got {text}, expected {INTEGER}; correct the value",)) for text in NO_INTEGERS),
    *((f"bf16: true\nseed: '{text}'", ("PATH:2 seed: got",)) for text in ("1.5", "", "1e999", "true")),
    *((f"--lr={text}", (f"--lr: got {text}, expected {NUMBER}; correct the value",)) for text in ("nan", "inf", "-inf", "1e999", "fast")),
    ("bf16: 7", ("PATH:1 bf16: got 7, expected true or false; correct the value",)),
    ("--bf16 maybe", ("--bf16: got maybe, expected true or false; correct the value",)),
    ("--no-bf16 true", ("--no-bf16: got true, expected no value; give --no-bf16 or --bf16 true|false",)),
    ("--lr-decay-style cosin", ("--lr-decay-style: got cosin, expected one of constant, linear, cosine, WSD; did you mean cosine?",)),
    ("split: null", ("PATH:1 split: got null, expected text",)),
    ("--eos-token-id </s>", (f"--eos-token-id: got </s>, expected {INTEGER} or null; correct the value",)),
    *((f"--rope-scaling {text}", (f"--rope-scaling: got {text}, expected a mapping (on the command line JSON",)) for text in ("linear", "[1]", "{")),
    ("--pipeline-layer-split", (f"--pipeline-layer-split: got nothing, expected {SPLIT}; correct the value",)),
    ("--pipeline-layer-split x", (f"--pipeline-layer-split: got x, expected {SPLIT}; correct the value",)),
    ("--pipeline-layer-split 3 x", (f"--pipeline-layer-split: got 3 x, expected {SPLIT}; correct the value",)),
    *(
        (f"--pipeline-layer-split {text}", (f"got {text.strip(QUOTE)}, expected {SPLIT}; separate them by spaces: --pipeline-layer-split 3 1",))
        for text in ("3,1", "3, 1", "'3 1'")
    ),
    *((f"pipeline_layer_split: {text}", ("; write [3, 1]",)) for text in ("3,1", "3 1", "'3, 1'")),
    *(
        (f"param_group: {text}", ("; put a text with a colon in it in quotes",))
        for text in ("\n  - embed*: lr=1e-3, weight_decay=0", "\n  - embed*: 3\n  - a", "{'embed*': 3}")
    ),
    ("param_group: [a, null]", ("; correct the value",)),
    (
        "training:\n  seq_length: 8\n  lr: 1\n  rotary-base: 1\n  sequence_parallel_: true",
        (
            "PATH:3 lr: got it under training:, expected it under optimizer: or at the top; move it",
            "PATH:4 rotary-base: got it under training:, expected it under model: or at the top; move it",
            "PATH:5 sequence_parallel_: got an unknown key, expected an option of this command; did you mean sequence_parallel?",
        ),
    ),
    (
        "# comment\nmicro_batchsize: 4\nfrobnicate: 1\noptimiser: {lr: 1}\ntraining: 3",
        (
            f"PATH:2 micro_batchsize: {KEY}; did you mean micro_batch_size?",
            f"PATH:3 frobnicate: {KEY}; --help lists the options; docs/migrating.md has the names of other trainers",
            f"PATH:4 optimiser: {KEY}; did you mean optimizer?",
            f"PATH:5 training: {KEY}; write its options below it, as in training: {{option: value}}",
        ),
    ),
    (
        "--num-layer 4 --lr-warmup 3 --bf-16 --batch-size 8 --l 1",
        (
            f"--num-layer: {UNKNOWN}; did you mean --num-layers?",
            f"--lr-warmup: {UNKNOWN}; did you mean --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction?",
            f"--bf-16: {UNKNOWN}; did you mean --bf16?",
            f"--batch-size: {UNKNOWN}; did you mean --micro-batch-size, --global-batch-size or --rampup-batch-size?",
            f"--l: {UNKNOWN}; --help lists the options; docs/migrating.md has the names of other trainers",
        ),
    ),
    ("- train -lr 3", (f"command line: got - train -lr 3, {STRAY}",)),
    ("--lr=3 4 --seed 1", (f"command line: got 4, {STRAY}",)),
    ("--lr 1 --lr fast", (f"--lr: got fast, expected {NUMBER}; correct the value",)),
    (
        "num_layers: 4\nmodel:\n  num-hidden-layers: 5\nlr: 1\nlr: 2",
        (
            "PATH:3 num-hidden-layers: got 5 after 4 (PATH:1 num_layers), expected one value of num_hidden_layers; give it once",
            "PATH:5 lr: got 2.0 after 1.0 (PATH:4 lr), expected one value of lr; give it once",
        ),
    ),
    ("model:\n  rope_scaling:\n    factor: 8.0\n    rope_type: linear\n    factor: 2.0", (f"PATH:5 factor: got it again after line 3, {ONCE}",)),
    ("rope_scaling: {factor: 8.0, rope_type: linear, factor: 8.0}", (f"PATH:1 factor: got it again after line 1, {ONCE}",)),
    ("""--rope-scaling '{"rope_type": "linear", "factor": 8.0, "factor": 2.0}'""", ("; factor stands there twice: give it once",)),
    ("--config none.yaml", ("--config none.yaml: got",)),
    ("--config /", ("a readable YAML file",)),
    ("lr: 1\nseed: [1\nbf16: true", ("PATH:3: got ",)),
    ("\n- lr", ("PATH:2: got something else, expected key: value lines",)),
    *((words, ("--config: got ",)) for words in ("--config", "--config a b", "--config a --config b")),
]  # fmt: skip
"""A command line or a file, and a part of each problem."""


@pytest.mark.parametrize(("text", "problems"), REFUSED)
def test_what_is_refused(text: str, problems: tuple[str, ...], tmp_path: Path) -> None:
    for problem, expected in zip(refusal(*given(text, tmp_path)), problems, strict=True):
        assert expected.replace("PATH", str(tmp_path / "run.yaml")) in problem


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"lr: \xff\n")
    [problem] = refusal("--config", str(tmp_path / "run.yaml"))
    assert problem.endswith("expected a readable YAML file; check the path")


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


def test_a_value_may_be_given_in_the_word_of_another_trainer(tmp_path: Path) -> None:
    given = run("--cp-comm-type", "p2p"), run("--config", yaml_file(tmp_path, "cp_comm_type: p2p\n")), run("--cp-comm-type", "ring")
    assert [parsed.get(ParallelConfig).cp_comm_type for parsed in given] == ["ring"] * 3


def test_flags_win_over_yaml(tmp_path: Path) -> None:
    """Also with null, and of a list all of it."""
    file = yaml_file(tmp_path, "eos_token_id: 2\nrope_scaling: {rope_type: linear, factor: 2.0}\nparam_group: ['a: lr=1']\n")
    found = run("--config", file, "--eos-token-id", "null", "--rope-scaling", "null", "--param-group", "c: lr=1").differences()
    assert found == {"param_group": ("c: lr=1",)}
    path = yaml_file(tmp_path, "lr: 1.0\nmin_lr: 0.5\nmodel: llama3-8b\n")
    parsed = run("--lr", "2", "--config", path, "--preset", "llama2-7b")
    assert parsed.get(OptimizerConfig) == OptimizerConfig(lr=2.0, min_lr=0.5)
    assert parsed.get(ModelConfig).preset == "llama2-7b"
    assert dict(parsed.sources) == {"lr": "--lr", "min_lr": f"{path}:2 min_lr", "preset": "--preset"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("zero-stage", "give --data-parallel-sharding-strategy optim (stage 1), optim_grads (2) or optim_grads_params (3)"),
        ("learning_rate", "give --lr"),
        ("training.seq_len", "give --seq-length"),
        ("data_seed", "give --seed"),
        ("dataloader-num-workers", "leave it out: datasets are memory-mapped"),
        ("nproc_per_node", "it is torchrun's: write it before -m megatron_llama"),
        ("fp8-format", "give --fp8 blockwise or tensorwise with --bf16: a scale for each tile, or for each tensor"),
        ("first-last-layers-bf16", "give --fp8-bf16-layers, as many at either end"),
        ("fp8-amax-history-len", "--fp8 keeps no state: delayed scaling is not written here"),
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


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--expert-model-parallel-size", "pretrain, .* and .* have --expert-model-parallel-size"),  # one spelt similarly is known
        ("--moe-router-topk", "pretrain, .* and .* have --moe-router-topk"),
        ("--no-norm-topk-prob", "pretrain, .* and .* have --no-norm-topk-prob"),
        ("--expert-tensor-parallel-size", "--help lists the options"),  # Megatron's, which sets nothing
    ],
)
def test_an_option_of_another_command_is_no_misspelt_one(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "--load", "x", word]) == 2
    message = capsys.readouterr().err
    assert re.search(rf"{word}: got an unknown flag, expected an option of this command; {says}$", message, re.MULTILINE), message


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
        preset="llama3-8b", num_hidden_layers=4, intermediate_size=64, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=500000.0,
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
    before = run("--moe-router-pre-softmax")
    assert not before.get(ModelConfig).norm_topk_prob and "norm_topk_prob" in before.explicit
    assert run("--moe-router-pre-softmax", "false").get(ModelConfig).norm_topk_prob
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
