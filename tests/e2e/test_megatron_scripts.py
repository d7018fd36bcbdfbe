"""The launch scripts of Megatron-LLaMA, whose arguments stay as they are: planned at their size, and run in small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron_llama.cli import main

from tests.e2e.product import Product, column, exact_curve, log, state
from tests.launcher import Launcher, free_port

SEVEN = {"num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "ffn-hidden-size": 11008}
THIRTEEN = {"num-layers": 40, "hidden-size": 5120, "num-attention-heads": 40, "ffn-hidden-size": 13824}
FRESH_OPTIMIZER = ("--no-load-optim",)


def arguments(
    shape: Mapping[str, int], seq_length: int, micro: int, batch: int, bucket: str, job: str, *more: str, paths: Mapping[str, str]
) -> list[str]:
    """What such a script hands to its program, in its order and spelling. ``paths``: what a user fills in."""
    layers, hidden, heads, ffn = (f"--{name} {size}" for name, size in shape.items())
    text = f"""
        --sequence-parallel --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1
        {layers} {hidden} {heads} --seq-length {seq_length} --max-position-embeddings {seq_length}
        --no-position-embedding --use-rotary-position-embeddings --swiglu {ffn} --disable-bias-linear --RMSNorm
        --layernorm-epsilon 1e-6 --causal-lm
        --tokenizer-type PretrainedFromHF --tokenizer-name-or-path {paths["tokenizer"]} --make-vocab-size-divisible-by 1
        --init-method-std 0.01 --micro-batch-size {micro} --global-batch-size {batch} --train-iters {paths["iters"]}
        --lr 6.0e-5 --lr-decay-iters 10 --lr-warmup-iters 5 --min-lr 6.0e-6 --override-opt_param-scheduler --lr-decay-style cosine
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1
        --overlapped-distributed-optimizer --reduce-bucket-size={bucket} --no-gradient-accumulation-fusion
        --dataloader-type cyclic --data-impl mmap --data-path {paths["data"]} --split 98,2,0
        --eval-interval 1000 --eval-iters 10 --save-interval 100 --save {paths["save"]} --load {paths["load"]} --log-interval 1
        --tensorboard-dir {paths["board"]} --tensorboard-queue-size 1000
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
        --job-name {job} --bf16 --recompute-activations --recompute-granularity selective --use-flash-attn
        --attention-dropout 0 --hidden-dropout 0
    """
    return ["pretrain", *more, *text.split()]


HERE = {
    "tokenizer": "tokenizer", "data": "0.2 first 0.3 second 0.5 third", "save": "checkpoints", "load": "weights", "board": "board",
    "iters": "1000",
}
SCRIPTS = {
    "LLaMA_13_standalone": ((THIRTEEN, 2048, 4, 128, "2e8", "LLaMA_tp2_pp1_mbs4_gpus8", "--finetune", *FRESH_OPTIMIZER), 8),
    "LLaMA2_7B_standalone": ((SEVEN, 4096, 2, 64, "2e8", "LLaMA_tp2_pp1_mbs2_gpus8"), 8),
    "LLaMA_13_slurm": ((THIRTEEN, 2048, 4, 2048, "4e8", "LLaMA_tp2_pp1_mbs4_gpus8", "--finetune", *FRESH_OPTIMIZER), 512),
}
CHECKED = (
    *("no-position-embedding", "use-rotary-position-embeddings", "swiglu", "disable-bias-linear", "RMSNorm", "causal-lm"),
    *("data-impl", "use-flash-attn", "no-gradient-accumulation-fusion", "override-opt_param-scheduler"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_planned_as_it_is(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From an empty folder: every path is only warned about."""
    monkeypatch.chdir(tmp_path)
    given, world = SCRIPTS[name]
    shape, seq_length, micro, batch, *_ = given
    assert main([*arguments(*given, paths=HERE), "--dry-run", "--world-size", str(world)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    dp = world // 2
    assert f"layout          {world} processes = tp 2 x cp 1 x pp 1 x dp {dp}, sequence parallel; " in said
    assert f"batch           {batch:,} samples = {batch // (micro * dp)} microbatches x {micro} x dp {dp}; " in said
    assert f"{batch * seq_length:,} tokens a step, {seq_length:,} a sample\niterations      1,000\n" in said
    total = {32: 6_738_415_616, 40: 13_015_864_320}[shape["num-layers"]]
    assert f"model           {total:,} parameters in {9 * shape['num-layers'] + 3} tensors, all trained; " in said
    assert ", vocabulary 32,000, padded to 32,000\n" in said
    assert "reduce-scatters" in said and "in flight, selective; with the state" in said
    accepted = {flag[2:] for line in said.splitlines() if line.endswith("changes nothing") for flag in line.split(":")[0].split(", ")}
    assert accepted == set(CHECKED), "each of these is said"
    assert "--attention-dropout, --hidden-dropout: LLaMA is trained without dropout: only 0 is accepted\n" in said


SMALL = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "ffn-hidden-size": 128}


@pytest.fixture(scope="module")
def paths(product: Product, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a user has: three datasets, a tokenizer, weights from HuggingFace and those that Megatron-LLaMA's converter made of them."""
    folder = tmp_path_factory.mktemp("paths")
    for name in ("first", "second", "third"):
        for suffix in (".bin", ".idx", ".meta.json"):
            (folder / f"{name}{suffix}").symlink_to(f"{product.data}{suffix}")
    product.train(save=folder / "made", num_layers=2, num_query_groups=4, train_iters=1, rms_norm_eps=1e-6)
    product.run("export", "--load", folder / "made", "--output", folder / "hf").ok()
    product.run("convert", folder / "hf", folder / "megatron", "--to", "megatron-llama", "--tensor-model-parallel-size", 2).ok()
    data = " ".join(f"{share} {folder / name}" for share, name in ((0.2, "first"), (0.3, "second"), (0.5, "third")))
    made = {"hf": str(folder / "hf"), "megatron": str(folder / "megatron"), "native": str(folder / "made")}
    return {**made, "tokenizer": f"{product.data}-tokenizer", "data": data, "iters": "3"}


def small(name: str, paths: Mapping[str, str], load: str, folder: Path) -> list[str]:
    """A script with another model and batch, everything else as it is."""
    (_, _, _, _, bucket, job, *more), _ = SCRIPTS[name]
    places = {**paths, "load": load, "save": str(folder / "save"), "board": str(folder / "board")}
    return arguments(SMALL, 32, 2, 8, bucket, job, *more, paths=places)


def three_steps(folder: Path, job: str) -> None:
    assert column(folder / "save", "iteration") == [1, 2, 3] and column(folder / "save", "consumed_samples") == [8, 16, 24]
    assert column(folder / "save", "learning_rate") == pytest.approx([0.0, 1.2e-5, 2.4e-5])
    assert [entry["iteration"] for entry in log(folder / "save") if "validation_loss" in entry] == [0, 3]
    assert len(list((folder / "board" / job).iterdir())) == 1


@pytest.mark.long
def test_on_one_machine_from_huggingface_weights(launcher: Launcher, paths: dict[str, str], tmp_path: Path) -> None:
    """Four ranks; and the same curve from what Megatron-LLaMA has of these weights, started by srun."""
    launcher.run(small("LLaMA_13_standalone", paths, paths["hf"], tmp_path / "hf"), 4).ok()
    three_steps(tmp_path / "hf", "LLaMA_tp2_pp1_mbs4_gpus8")
    port = next(port for port in iter(free_port, 0) if port < 40000)
    job = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(port - 20000), "SLURM_STEP_NODELIST": "localhost", "WORLD_SIZE": "8"}
    argv = small("LLaMA_13_slurm", paths, paths["megatron"], tmp_path / "megatron")
    launcher.run(argv, 4, place=lambda rank: {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}).ok()
    three_steps(tmp_path / "megatron", "LLaMA_tp2_pp1_mbs4_gpus8")
    assert exact_curve(tmp_path / "megatron" / "save") == exact_curve(tmp_path / "hf" / "save")


@pytest.mark.long
def test_from_nothing_and_again(launcher: Launcher, paths: dict[str, str], tmp_path: Path) -> None:
    """The third script has no --finetune: its first start is a fresh one where --load is --save, its second goes on."""
    argv = small("LLaMA2_7B_standalone", paths, str(tmp_path / "save"), tmp_path)
    assert f" --load {tmp_path}/save: no checkpoint there yet, a fresh start\n" in launcher.run(argv, 2).ok().out
    three_steps(tmp_path, "LLaMA_tp2_pp1_mbs2_gpus8")
    assert "lm_head.weight" in state(tmp_path / "save" / "iter_0000003"), "the head is a weight of its own"
    again = [word if word != "3" else "4" for word in argv]
    launcher.run(again, 2).ok()
    assert column(tmp_path / "save", "iteration") == [1, 2, 3, 4]
