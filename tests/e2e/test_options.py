"""Every option does what it says: each is tried here, or by a test that is marked with its name (``tries``)."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.parse import options_of
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.commands.pretrain import SECTIONS
from megatron_llama.train.run.lr import learning_rate
from megatron_llama.train.setup.deciders import CONFIGURATION
from megatron_llama.train.setup.draft import Draft
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.processes import imagined_processes
from torch import Tensor

from tests.e2e.product import (
    DP2,
    EVALUATED,
    GLOBAL_BATCH_SIZE,
    ONE,
    SEQ_LENGTH,
    TINY,
    VOCAB_SIZE,
    Product,
    column,
    copy_tokens,
    exact_curve,
    log,
    state,
    words,
)

TESTS = Path(__file__).parent.parent
EIGHT = {"world_size": 8, "pipeline_model_parallel_size": 2, "global_batch_size": 16}
PLANNED: Mapping[str, tuple[dict[str, object], str]] = {
    "preset": ({"model": "llama3-8b", **dict.fromkeys(TINY), "train_iters": 1}, "llama3-8b: 8,030,261,248 parameters in 291 tensors"),
    "vocab_size": ({"vocab_size": 600}, "vocabulary 600, padded to 640"),
    "make_vocab_size_divisible_by": ({"make_vocab_size_divisible_by": 200}, "vocabulary 512, padded to 600"),
    "hidden_size": ({"hidden_size": 128}, f"model           {2 * 512 * 128 + 4 * (3 * 128 * 128 + 3 * 128 * 128 + 256) + 128:,} parameters in 39"),
    "intermediate_size": ({"intermediate_size": 256}, f"model           {213_568 + 4 * 3 * 64 * 128:,} parameters in 39"),
    "num_hidden_layers": ({"num_layers": 5}, f"model           {213_568 + 36_992:,} parameters in 48"),
    "num_key_value_heads": ({"num_query_groups": 4}, f"model           {213_568 + 4 * 2 * 32 * 64:,} parameters in 39"),
    "head_dim": ({"head_dim": 32}, f"model           {213_568 + 4 * 12 * 16 * 64:,} parameters in 39"),
    "attention_bias": ({"attention_bias": True}, f"model           {213_568 + 4 * (64 + 32 + 32 + 64):,} parameters in 55"),
    "mlp_bias": ({"mlp_bias": True}, f"model           {213_568 + 4 * (2 * 128 + 64):,} parameters in 51"),
    "tie_word_embeddings": ({"tie_word_embeddings": True}, f"model           {213_568 - 512 * 64:,} parameters in 38"),
    "pipeline_model_parallel_size": (EIGHT, "layout          8 processes = tp 1 x cp 1 x pp 2 x dp 4"),
    "context_parallel_size": ({**EIGHT, "context_parallel_size": 2}, "layout          8 processes = tp 1 x cp 2 x pp 2 x dp 2"),
    "hierarchical_context_parallel_sizes": (
        {**EIGHT, "context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
        "layout          8 processes = tp 1 x cp 4 (a2a+p2p 2 x 2) x pp 2 x dp 1;",
    ),
    "sequence_parallel": ({**EIGHT, "tensor_model_parallel_size": 2, "sequence_parallel": True}, "tp 2 x cp 1 x pp 2 x dp 2, sequence parallel"),
    "pipeline_schedule": ({**EIGHT, "pipeline_schedule": "gpipe"}, " gpipe, 2 stages, 2 microbatches (validated)\n  pp rank 0     F0 F1 B0 B1"),
    "virtual_pipeline_model_parallel_size": (
        {**EIGHT, "num_layers": 6, "pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 3},
        "pp rank 0       layer 0, layer 2, layer 4, embedding:",
    ),
    "pipeline_layer_split": ({**EIGHT, "pipeline_layer_split": (1, 3)}, "pp rank 1       layers 1-3, head:"),
    "account_for_embedding_in_pipeline_split": ({**EIGHT, "num_layers": 5, "account_for_embedding_in_pipeline_split": True}, "layers 0-1, embedding:"),
    "account_for_loss_in_pipeline_split": ({**EIGHT, "num_layers": 5, "account_for_loss_in_pipeline_split": True}, "  layers 3-4, head:"),
    "recompute_num_layers": ({"recompute_granularity": "selective", "recompute_num_layers": 3}, " in flight, selective on 3 blocks of each stage"),
    "data_parallel_sharding_strategy": ({**EIGHT, "data_parallel_sharding_strategy": "optim_grads"}, "4 reduce-scatters, 2 all-gathers"),
    "data_parallel_shard_size": ({**EIGHT, "data_parallel_shard_size": 2}, " in 2 shards and 2 replicas;"),
    "param_slots": ({"data_parallel_sharding_strategy": "optim_grads_params", "param_slots": 1}, "parameters 274.2 KiB, "),
    "grad_slots": ({"data_parallel_sharding_strategy": "optim_grads_params", "grad_slots": 1}, "parameter shards 832.0 KiB, gradients 1.1 MiB"),
    "reduce_bucket_size": ({"reduce_bucket_size": 50_000}, "  layout        7 buckets, the largest 40,960 elements"),
    "seq_length": ({"seq_length": 64}, "; 512 tokens a step, 64 a sample"),
    "micro_batch_size": ({"micro_batch_size": 4}, "batch           8 samples = 2 microbatches x 4 x dp 1"),
    "global_batch_size": ({"global_batch_size": 24}, "batch           24 samples = 12 microbatches x 2 x dp 1"),
    "train_iters": ({"train_iters": 1234}, "iterations      1 to 1,234"),
    "data_path": ({"data_path": None, "vocab_size": 512}, "warning: --data-path is not given"),
}


@pytest.fixture(scope="module")
def plan(product: Product) -> str:
    """What is planned without further options."""
    return product.run(*product.command(dry_run=True)).ok().out


@pytest.mark.long
@pytest.mark.parametrize("option", PLANNED)
def test_options_that_the_plan_shows(option: str, product: Product, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, says = PLANNED[option]
    assert main(product.command(dry_run=True, **changes)) == 0, capsys.readouterr().err
    assert says in capsys.readouterr().out and says not in plan


REFUSED: Mapping[str, object] = {
    "model_type": "gpt2", "add_qkv_bias": True, "qk_norm": "head", "norm_position": "both", "apply_layernorm_1p": True,
    "hidden_act": "gelu", "embedding_multiplier": 8.0, "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_no_llama_has_is_refused(option: str, product: Product, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(product.command(dry_run=True, **{option: REFUSED[option]})) == 2
    assert f"--{option.replace('_', '-')}: got {REFUSED[option]}, expected " in capsys.readouterr().err


IN_SAMPLES = {"train_iters": None, "lr_decay_iters": None, "train_samples": 4 * GLOBAL_BATCH_SIZE}
RATES: Mapping[str, tuple[dict[str, object], list[float]]] = {
    "lr": ({"lr": 2.0, "lr_decay_style": "constant"}, [2.0, 2.0, 2.0, 2.0]),
    "min_lr": ({"lr": 1.0, "min_lr": 0.2}, [1.0, 0.8, 0.6, 0.4]),
    "lr_decay_style": ({"lr": 1.0, "lr_decay_style": "cosine"}, [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]),
    "lr_decay_iters": ({"lr": 1.0, "lr_decay_iters": 2, "min_lr": 0.1}, [1.0, 0.55, 0.1, 0.1]),
    "lr_wsd_decay_iters": ({"lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}, [1.0, 1.0, 1.0, 2 * math.sqrt(0.5) - 1]),
    "lr_wsd_decay_style": ({"lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "linear"}, [1.0, 0.75, 0.5, 0.25]),
    "lr_warmup_iters": ({"lr": 1.0, "lr_warmup_iters": 2}, [0.0, 0.5, 1.0, 0.5]),
    "lr_warmup_fraction": ({"lr": 1.0, "lr_warmup_fraction": 0.375}, [0.0, 2 / 3, 0.8, 0.4]),
    "lr_decay_samples": ({**IN_SAMPLES, "lr": 1.0, "lr_decay_samples": 16, "min_lr": 0.1}, [1.0, 0.55, 0.1, 0.1]),
    "lr_warmup_samples": ({**IN_SAMPLES, "lr": 1.0, "lr_warmup_samples": 12}, [0.0, 2 / 3, 0.8, 0.4]),
    "lr_wsd_decay_samples": (
        {**IN_SAMPLES, "lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 12, "lr_wsd_decay_style": "linear"},
        [1.0, 1.0, 1.0, 2 / 3],
    ),
}


@pytest.mark.parametrize("option", RATES)
def test_options_that_the_learning_rate_shows(option: str, product: Product) -> None:
    changes, rates = RATES[option]
    given = {**TINY, "data_path": product.data, "train_iters": 4, "lr_decay_iters": 4, **changes}
    parsed = read_options({name: value for name, value in given.items() if value is not None}, {}, SECTIONS)
    config = decide(Draft(parsed, imagined_processes(1, 0, are_here=True)), CONFIGURATION).config
    found = [learning_rate(config.optimizer, config.training.train_iters, step, step * GLOBAL_BATCH_SIZE) for step in range(4)]
    assert found == pytest.approx(rates, rel=1e-12)


@pytest.mark.long
def test_steps_have_the_learning_rate_of_the_options(product: Product, tmp_path: Path) -> None:
    """Counted in samples, after a warm-up: what each step of a run is given."""
    changes, rates = RATES["lr_warmup_samples"]
    product.train(save=tmp_path, seq_length=8, clip_grad=1e-6, adam_eps=1e6, **changes)
    assert column(tmp_path, "learning_rate") == pytest.approx(rates, rel=1e-12)


@pytest.mark.long
@pytest.mark.tries("param_group")
def test_param_group(product: Product, tmp_path: Path) -> None:
    """A group of everything is a run with other options, schedule included; resuming without it is told."""
    schedule = {"train_iters": 4, "lr_decay_iters": 4, "lr_warmup_iters": 1, "min_lr": 1e-4}
    product.train(save=tmp_path / "a", **schedule, lr=2e-3, param_group="*: lr_mult=2")
    product.train(save=tmp_path / "b", **{**schedule, "min_lr": 2e-4}, lr=4e-3)
    assert column(tmp_path / "a", "lm_loss") == column(tmp_path / "b", "lm_loss")
    said = product.train(save=tmp_path / "a", load=tmp_path / "a", **{**schedule, "train_iters": 5}, lr=2e-3)
    assert "warning: --param-group was *: lr_mult=2 when the checkpoint was saved and is not given" in said.out


FORWARD: Mapping[str, dict[str, object]] = {
    "rms_norm_eps": {"rms_norm_eps": 1.0},
    "rope_theta": {"rope_theta": 100.0},
    "rope_scaling": {"rope_scaling": '{"rope_type": "linear", "factor": 4.0}'},
    "num_attention_heads": {"num_attention_heads": 8},
}


@pytest.fixture(scope="module")
def first_loss(product: Product, tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("first")
    product.train(save=folder, train_iters=1, initializer_range=0.2)
    return float(column(folder, "lm_loss")[0])


@pytest.mark.long
@pytest.mark.parametrize("option", FORWARD)
def test_options_that_the_loss_shows(option: str, product: Product, first_loss: float, tmp_path: Path) -> None:
    product.train(save=tmp_path, train_iters=1, initializer_range=0.2, **FORWARD[option])
    assert abs(column(tmp_path, "lm_loss")[0] - first_loss) > 1e-4


@pytest.mark.long
@pytest.mark.tries("initializer_range")
def test_initializer_range(product: Product, tmp_path: Path) -> None:
    for size in (0.0, 0.1):
        product.train(save=tmp_path / str(size), train_iters=1, lr=0.0, initializer_range=size)
    assert column(tmp_path / "0.0", "lm_loss")[0] == pytest.approx(math.log(VOCAB_SIZE), rel=1e-7)
    weights = state(tmp_path / "0.1" / "iter_0000001")
    for name in ("model.embed_tokens.weight", "model.layers.2.self_attn.q_proj.weight", "lm_head.weight"):
        assert weights[name].std().item() == pytest.approx(0.1, rel=0.03)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))


@pytest.mark.tries("seed")
@pytest.mark.long
def test_seed(product: Product, exported: Path, tmp_path: Path) -> None:
    """Of the weights, and of the order of the samples."""
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        product.train(save=tmp_path / name, train_iters=1, lr=0.0, seed=seed)
    weights = [state(tmp_path / name / "iter_0000001")["lm_head.weight"] for name in ("a", "b", "again")]
    assert torch.equal(weights[0], weights[2]) and not torch.isclose(weights[0], weights[1], rtol=0, atol=1e-4).any(dim=1).all()
    for seed in (1, 2):
        product.train(init_from_hf=exported, save=tmp_path / f"order{seed}", train_iters=1, seed=seed)
    first, second = (column(tmp_path / f"order{seed}", "lm_loss")[0] for seed in (1, 2))
    assert abs(first - second) > 1e-4


@pytest.fixture(scope="module")
def one_step(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Tensor]]]:
    """Folder and tensors after one step, by changes of the options."""
    done: dict[str, Path] = {}

    def take(**changes: object) -> tuple[Path, dict[str, Tensor]]:
        key = json.dumps(changes)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("step")
            product.train(**{"save": done[key], "train_iters": 1, "weight_decay": 0.0, "clip_grad": 0.0, **changes})
        return done[key], state(done[key] / "iter_0000001")

    return take


OneStep = Callable[..., tuple[Path, dict[str, Tensor]]]
MATRIX, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


@pytest.mark.long
@pytest.mark.tries("weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
def test_options_of_adamw(one_step: OneStep) -> None:
    """Decay: lr 3e-3 x 0.5 of every matrix, not of norms. Moments: (1 - beta) times the gradient and its square. The first step is lr for
    every element; with an eps beyond every gradient almost nothing."""
    (_, before), (_, base), (_, decayed) = one_step(lr=0.0), one_step(), one_step(weight_decay=0.5)
    for name in (MATRIX, "model.embed_tokens.weight"):
        torch.testing.assert_close(decayed[name], base[name] - 3e-3 * 0.5 * before[name], rtol=0, atol=1e-8)
    assert torch.equal(decayed[NORM], base[NORM]) and not torch.equal(before[NORM], base[NORM])
    (_, first), (_, second), (_, damped) = one_step(adam_beta1=0.5), one_step(adam_beta2=0.9), one_step(adam_eps=10.0)
    mean, square = f"optimizer.exp_avg.{MATRIX}", f"optimizer.exp_avg_sq.{MATRIX}"
    torch.testing.assert_close(first[mean], base[mean] * 5)
    torch.testing.assert_close(second[square], base[square] * 100, rtol=1e-4, atol=0)
    assert torch.equal(second[mean], base[mean])
    assert (base[MATRIX] - before[MATRIX]).abs().median().item() == pytest.approx(3e-3, rel=1e-3)
    assert 0 < (damped[MATRIX] - before[MATRIX]).abs().max().item() < 3e-4


@pytest.mark.long
@pytest.mark.tries("clip_grad")
def test_clip_grad(one_step: OneStep) -> None:
    """The logged norm is that before clipping, the moments hold the clipped gradient."""

    def norm(tensors: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float(t.double().square().sum()) for name, t in tensors.items() if ".exp_avg." in name)) / 0.1

    (folder, base), (clipped_folder, clipped) = one_step(), one_step(clip_grad=0.25)
    logged = column(folder, "grad_norm")
    assert logged == column(clipped_folder, "grad_norm") and logged[0] > 1.0
    assert norm(base) == pytest.approx(logged[0], rel=1e-5) and norm(clipped) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.tries("log_interval", "eval_interval", "eval_iters", "save_interval")
@pytest.mark.long
def test_when_to_log_evaluate_and_save(product: Product, tmp_path: Path) -> None:
    product.train(save=tmp_path, train_iters=7, log_interval=3, eval_interval=4, eval_iters=3, save_interval=2)
    assert column(tmp_path, "iteration") == [3, 6, 7]
    evaluated = [(entry["iteration"], entry["validation_tokens"]) for entry in log(tmp_path) if "validation_loss" in entry]
    assert evaluated == [(at, 3 * GLOBAL_BATCH_SIZE * SEQ_LENGTH) for at in (0, 4, 7)]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_000000{at}" for at in (2, 4, 6, 7)]


@pytest.mark.tries("split")
@pytest.mark.long
def test_split(product: Product, tmp_path: Path) -> None:
    """The whole validation split is evaluated with --eval-iters 0: half of the documents, or a tenth."""
    tokens = {}
    for split in ("50,50,0", "90,10,0"):
        product.train(save=tmp_path / split, train_iters=1, eval_interval=1, eval_iters=0, split=split)
        tokens[split] = log(tmp_path / split)[0]["validation_tokens"]
    whole = Path(f"{product.data}.bin").stat().st_size // 2
    assert tokens["50,50,0"] / whole == pytest.approx(0.5, abs=0.15) and tokens["90,10,0"] / whole == pytest.approx(0.1, abs=0.05)
    nothing = product.train(train_iters=1, eval_interval=1, split="100,0,0")
    assert " warning: --eval-interval is ignored: --split 100,0,0 leaves nothing for validation\n" in nothing.out
    planned = product.run(*product.command(train_iters=100_000, split="100,0,0", eval_interval=1), "--dry-run").ok().out
    assert re.search(r"^warning: 100,000 iterations of 8 samples read the [\d,]+ training samples \d+ times$", planned, re.MULTILINE)
    assert "\nwarning: --eval-interval is ignored: " in planned
    assert " warning: without --save and --export-hf the trained model is lost when the run ends\n" in nothing.out


@pytest.mark.tries("max_position_embeddings", "bos_token_id", "eos_token_id")
def test_what_the_exported_config_says(product: Product, tmp_path: Path) -> None:
    changes = {
        "max_position_embeddings": 77, "bos_token_id": 5, "eos_token_id": 6, "rope_theta": 5e5, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    product.train(save=tmp_path / "run", train_iters=1, **changes)
    product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "hf").ok()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {name: config[name] for name in changes if name != "rope_theta"} == {
        name: value for name, value in changes.items() if name != "rope_theta"
    }
    assert config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta")) == 5e5


@pytest.mark.long
@pytest.mark.tries("tokenizer_model")
def test_tokenizer_model(product: Product, tmp_path: Path) -> None:
    """Says what the vocabulary is, and is kept beside the checkpoints, where the dataset knows no tokenizer."""
    copy_tokens(product.data, tmp_path / "tokens")
    options = words({**TINY, "train_iters": 1, "data_path": tmp_path / "tokens", "save": tmp_path / "run"})
    without = product.run("pretrain", *options)
    assert without.codes == (2,) and "--vocab-size: got nothing" in without.err
    product.run("pretrain", *options, "--tokenizer-model", f"{product.data}-tokenizer").ok()
    kept, given = (folder / "tokenizer.model" for folder in (tmp_path / "run" / "tokenizer", Path(f"{product.data}-tokenizer")))
    assert kept.read_bytes() == given.read_bytes()


@pytest.mark.tries("cp_comm_type")
@pytest.mark.long
def test_cp_comm_type(straight: Callable[[str], Path]) -> None:
    """A ring adds up the same attention in another order: equal to 1e-6, as another test demands, but not in every bit."""
    whole, ring, heads = (column(straight(name), "lm_loss") for name in ("cp2", "cp2 ring", "cp2 a2a"))
    assert whole != ring != heads != whole


@pytest.mark.tries("grad_reduce_in_bf16")
@pytest.mark.long
def test_grad_reduce_in_bf16(product: Product, tmp_path: Path) -> None:
    """Halves the messages, and with them the digits of what two replicas add up; a single process has nobody to send to."""
    for name, layout in (("one", ONE), ("dp2", DP2)):
        for wire in (None, True):
            product.train(layout, save=tmp_path / f"{name} {wire}", train_iters=3, grad_reduce_in_bf16=wire)
    exact, coarse = (column(tmp_path / f"dp2 {wire}", "grad_norm") for wire in (None, True))
    assert coarse == pytest.approx(exact, rel=1e-2)
    assert all(abs(ours - theirs) > 1e-6 for ours, theirs in zip(coarse, exact, strict=True))
    assert exact_curve(tmp_path / "one None") == exact_curve(tmp_path / "one True")


@pytest.mark.tries("deterministic_mode")
@pytest.mark.long
def test_deterministic_mode(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """On a host a run is always the same. What the mode does on a GPU: tests/parallel/test_deterministic.py."""
    product.train(DP2, save=tmp_path / "fixed", deterministic=True, **EVALUATED)
    assert exact_curve(tmp_path / "fixed") == exact_curve(straight("dp2 optim_grads"))


@pytest.mark.tries("recompute_granularity")
@pytest.mark.long
def test_recompute_granularity(product: Product, tmp_path: Path) -> None:
    """Less memory for the same run, to the bit: 8,192 tokens in four blocks keep 96 MiB, and 8 MiB when whole blocks recompute.

    What `selective` saves is less than the allocator's noise here; tests/model/test_activation_memory.py counts its bytes,
    and tests/model/nn/test_recompute.py compares bits in other layouts."""
    kinds = ("none", "selective", "full")
    for kind in kinds:
        length = {"seq_length": 1024, "micro_batch_size": 8, "train_iters": 2}
        product.train(save=tmp_path / kind, recompute_granularity=kind, **length)
    curves = [exact_curve(tmp_path / kind) for kind in kinds]
    peaks = [column(tmp_path / kind, "peak_memory_bytes")[-1] for kind in kinds]
    assert curves[0] == curves[1] == curves[2]
    assert peaks[0] - peaks[2] > 40 * 2**20 and peaks[1] > peaks[2]


def options_that_tests_try() -> Iterator[str]:
    """The options that tests say they try, by the mark ``tries``."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.tries":
                    yield from map(ast.literal_eval, mark.args)


def test_no_option_is_forgotten() -> None:
    tried = {*PLANNED, *REFUSED, *RATES, *FORWARD, *options_that_tests_try()}
    assert options_of(SECTIONS).keys() - tried == set(), "mark the test of the option with pytest.mark.tries"
    assert tried - options_of(SECTIONS).keys() == set(), "there is no such option any more"
