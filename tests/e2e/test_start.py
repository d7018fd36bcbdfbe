"""Where a run starts: what --load may name, what is taken from it, and what may differ from it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.schema import LogConfig
from megatron_llama.metrics.tensorboard import TensorBoard
from megatron_llama.train.api.common import snapshots

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.torch_dist import arguments, save
from tests.e2e.product import DP2, EVALUATED, TP2, Product, column, exact_curve, log, steps

SHAPE = {"num_layers", "num_query_groups"}


@pytest.fixture(scope="module")
def folders(product: Product, exported: Path, straight: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights of one run in every format that can be loaded."""
    folder = tmp_path_factory.mktemp("formats")
    for name in ("megatron-llama", "megatron"):
        product.run("convert", exported, folder / name, "--to", name, "--tensor-model-parallel-size", 2).ok()
    fields = json.loads((exported / "config.json").read_text())
    save(folder / "torch_dist", tensors(exported), arguments(fields, tp=2, rotary_base=int(fields["rope_parameters"]["rope_theta"])))
    return {"native": straight("one"), "hf": exported, **{name: folder / name for name in ("megatron-llama", "megatron", "torch_dist")}}


@pytest.fixture(scope="module")
def from_hf(product: Product, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps from the weights of a HuggingFace folder."""
    folder = tmp_path_factory.mktemp("from_hf")
    ended = product.train(TP2, init_from_hf=folders["hf"], save=folder, load="auto", train_iters=2, **dict.fromkeys(SHAPE))
    assert f" --load auto: no checkpoint there yet, the weights of {folders['hf']}\n" in ended.out
    return folder


@pytest.mark.long
@pytest.mark.tries("finetune")
@pytest.mark.parametrize(
    "name",
    [
        "native",
        pytest.param("hf", marks=pytest.mark.long),
        "megatron-llama",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("megatron", "torch_dist")),
    ],
)
def test_the_weights_of_every_format(name: str, product: Product, folders: dict[str, Path], from_hf: Path, tmp_path: Path) -> None:
    """They alone: iteration 0, the first samples, a fresh optimizer. Of a checkpoint that a run can go on from with --finetune."""
    finetune = True if name in ("native", "torch_dist") else None
    tokenizer = f"{product.data}-tokenizer"
    ended = product.train(
        TP2, load=folders[name], finetune=finetune, save=tmp_path, train_iters=2, tokenizer_model=tokenizer, **dict.fromkeys(SHAPE)
    )
    assert exact_curve(tmp_path) == exact_curve(from_hf) and column(tmp_path, "iteration") == [1, 2]
    path = folders[name] / "iter_0000006" if name == "native" else folders[name]
    assert f" --load {folders[name]}: the weights of {path}; the run begins at iteration 0\n" in ended.out


@pytest.mark.tries("load_optim")
def test_a_fresh_optimizer_where_the_run_was(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    ended = product.train(DP2, load=straight("one"), no_load_optim=True, save=tmp_path, train_iters=7, lr_decay_iters=7)
    assert column(tmp_path, "iteration") == [7] and column(tmp_path, "consumed_samples") == [56]
    meta = json.loads((tmp_path / "iter_0000007" / "meta.json").read_text())
    assert meta["optimizer_step"] == 1 and "begins at iteration 0" not in ended.out


@pytest.mark.long
def test_the_state_of_adam_in_a_run_of_another_optimizer(
    product: Product, straight: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused by name, in a run and in its dry run, from a folder of Megatron-Core as from one of ours."""
    folder = tmp_path / "megatron"
    product.run("convert", straight("one"), folder, "--to", "torch_dist").ok()
    capsys.readouterr()
    command = product.command(load=folder, optimizer="muon", train_iters=7, lr_decay_iters=7)
    assert main(command) == 1
    assert capsys.readouterr().err.strip() == (
        f"error: --optimizer muon: got the masters and moments of Adam in {folder}, expected the state of this optimizer; "
        "go on with --optimizer adam, or give --no-load-optim"
    )
    for given, expected in (
        (
            {"optimizer": "schedule_free_adamw", "lr_decay_style": "constant"},
            "error: --optimizer schedule_free_adamw: got the masters and moments",
        ),
        (
            {"exp_avg_sq_dtype": "8bit"},
            f"error: --exp-avg-sq-dtype 8bit: got moments in fp32 in {folder}, expected bytes and scales: moments are",
        ),
    ):
        command = product.command(load=folder, train_iters=7, lr_decay_iters=7, **given)
        assert main(command) == 1
        assert capsys.readouterr().err.startswith(expected)
    ended = product.train(load=folder, optimizer="muon", no_load_optim=True, save=tmp_path / "muon", train_iters=7, lr_decay_iters=7)
    assert " iteration 7/7 " in ended.out
    ended = product.train(load=folder, exp_avg_dtype="bf16", save=tmp_path / "bf16", train_iters=7, lr_decay_iters=7)
    assert " warning: --exp-avg-dtype is bf16: the moments, read as fp32, are converted\n" in ended.out
    assert log(tmp_path / "bf16")[-1]["iteration"] == 7


@pytest.mark.long
def test_the_log_has_a_learning_rate_that_is_used(product: Product, tmp_path: Path) -> None:
    """Of the parameters without a group, or, where all that are trained have one, of the first group."""
    cases = {"none": (), "some": ("mlp.*: lr_mult=0.5",), "all": ("embed*: lr_mult=0.5", "layers.*: lr_mult=0.25", "*norm.weight: lr_mult=0.25")}
    for name, groups in cases.items():
        frozen = {"freeze": "lm_head.weight"} if name == "all" else {}
        command = product.command(save=tmp_path / name, train_iters=2, lr_decay_iters=7, **frozen)
        product.run(*command, *(("--param-group", *groups) if groups else ())).ok()
    plain = column(tmp_path / "none", "learning_rate")
    assert column(tmp_path / "some", "learning_rate") == plain and plain[-1] > 0
    assert column(tmp_path / "all", "learning_rate") == pytest.approx([0.5 * lr for lr in plain])


@pytest.mark.long
def test_an_epsilon_of_its_own(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The flag wins over the checkpoint, with a warning; so it does in a plan."""
    options = {"load": straight("one"), "train_iters": 7, "save": tmp_path / "same"}
    assert "warning" not in product.train(**options).out
    changed = product.train(**{**options, "save": tmp_path / "other"}, layernorm_epsilon=1e-2).out
    warning = f"warning: --rms-norm-eps 0.01: the weights of {straight('one')}/iter_0000006 were trained with 1e-05\n"
    assert warning in changed
    same, other = (column(tmp_path / name, "lm_loss")[0] for name in ("same", "other"))
    assert abs(same - other) > 1e-5
    assert warning in product.run(*product.command(**options, layernorm_epsilon=1e-2, dry_run=True)).ok().out


@pytest.mark.parametrize("dry_run", [True, None], ids=["plan", "run"])
def test_other_shapes(dry_run: bool | None, product: Product, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, title in (("hf", f"The weights of {folders['hf']} have other shapes:"), ("native", "is a checkpoint of another model:")):
        assert main(product.command(load=folders[name], finetune=True, intermediate_size=256, dry_run=dry_run)) == 1
        said = capsys.readouterr().err
        assert title in said and said.count("\n") == 2 and "intermediate_size: got 128, expected 256;" in said


@pytest.mark.long
def test_the_first_start_of_a_run_that_resumes_itself(product: Product, tmp_path: Path) -> None:
    out = product.train(load=tmp_path, save=tmp_path, train_iters=1).out
    assert f" --load {tmp_path}: no checkpoint there yet, a fresh start\n" in out
    assert "fresh start" not in product.train(load=tmp_path, save=tmp_path, train_iters=2).out


@pytest.mark.long
def test_a_run_that_begins_never_enters_a_folder_with_checkpoints(
    product: Product, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    product.train(save=tmp_path, train_iters=1)
    for options, why in (
        ({"load": tmp_path, "finetune": True}, f"--finetune is given; give --load {tmp_path} without --finetune to resume"),
        ({"load": folders["native"], "finetune": True}, "--finetune is given; give"),
        ({"load": folders["hf"]}, f"{folders['hf']} is no checkpoint of it; give --load {tmp_path} to resume"),
    ):
        assert main(product.command(**options, save=tmp_path)) == 1
        assert f"got iter_0000001, expected no checkpoint, since {why}" in capsys.readouterr().err
    assert main(product.command(load=folders["megatron"], save=folders["megatron"], vocab_size=512)) == 1
    assert "got weights of another format, expected a folder of its own; give another --save" in capsys.readouterr().err


def test_what_has_no_effect_without_load(product: Product, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(product.command(finetune=True, log_timers_to_tensorboard=True, dry_run=True)) == 0
    said = capsys.readouterr().out
    assert "warning: --finetune and --no-load-optim have no effect without --load\n" in said
    assert "warning: --log-timers-to-tensorboard without --tensorboard-dir: nothing is written\n" in said


@pytest.mark.tries("tokenizer_type")
def test_tokenizer_type(product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decides which file of a folder counts."""
    folder = shutil.copytree(f"{product.data}-tokenizer", tmp_path / "tokenizer")
    for kind, status in (("Llama2Tokenizer", 0), ("PretrainedFromHF", 0)):
        assert main(product.command(tokenizer_model=folder, tokenizer_type=kind, dry_run=True)) == status
        assert f"warning: {folder}" not in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{}")
    assert main(product.command(tokenizer_model=folder, tokenizer_type="Llama2Tokenizer", vocab_size=512, dry_run=True)) == 0
    assert "tokenizer.json" not in capsys.readouterr().out
    assert main(product.command(tokenizer_model=folder, tokenizer_type="PretrainedFromHF", vocab_size=512, dry_run=True)) == 1
    assert f"error: {folder}/tokenizer.json: " in capsys.readouterr().err


def test_a_tokenizer_that_is_only_a_name(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts may name one of the hub's (tests/e2e/test_hub.py); it needs the hub's package, and what lies in a folder is a path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshots, "find_spec", lambda name: None)
    (tmp_path / "here").mkdir()
    name = "meta-llama/Llama-2-7b-hf"
    assert main(product.command(tokenizer_name_or_path=name)) == 2
    assert (
        f"error: --tokenizer-model {name}: got no such path, and no package huggingface_hub to look for it on the hub, "
        "expected a path that exists, or that package; check the path, or pip install '.[hub]'\n"
    ) in capsys.readouterr().err
    assert main(product.command(tokenizer_name_or_path="here/tokenizer")) == 1
    said = "error: here/tokenizer: got no such file, expected a .model file, a tokenizer.json, a tekken.json or a folder with one; check the path\n"
    assert said in capsys.readouterr().err


CURVES = {"lm loss": "lm_loss", "learning-rate": "learning_rate", "grad-norm": "grad_norm", "loss-scale": "loss_scale"}
TIMERS = {"tokens-per-second-per-gpu": "tokens_per_second_per_gpu", "tflops-per-gpu": "tflops_per_gpu"}


@pytest.mark.tries("job_name", "tensorboard_dir", "log_timers_to_tensorboard", "log_batch_size_to_tensorboard", "log_validation_ppl_to_tensorboard")
@pytest.mark.long
def test_tensorboard(product: Product, tmp_path: Path) -> None:
    """It shows what the log has, a resumed run as one curve; Megatron's three switches add theirs."""
    board = {"save": tmp_path / "run", "tensorboard_dir": tmp_path / "board", "job_name": "tiny", **EVALUATED}
    first = product.train(**board, train_iters=4, save_interval=3)
    assert " job tiny\n" in first.out
    assert set(tags(tmp_path / "board" / "tiny")) == {*CURVES, "lm loss validation"}
    chosen = {f"log_{name}_to_tensorboard": True for name in ("timers", "batch_size", "validation_ppl")}
    product.train(**board, load=tmp_path / "run" / "iter_0000003", **chosen)
    shown = tags(tmp_path / "board" / "tiny")
    for tag, key in {**CURVES, **TIMERS, "batch-size": "global_batch_size"}.items():
        start = 0 if tag in CURVES else 3
        expected = [(entry["iteration"], pytest.approx(entry[key], rel=1e-6)) for entry in steps(tmp_path / "run")[start:]]
        assert shown[tag] == expected, tag
    assert [step for step, _ in shown["iteration-time"]] == [4, 5, 6] and "exposed-communication-time" in shown
    evaluated = {entry["iteration"]: entry["validation_loss"] for entry in log(tmp_path / "run") if "validation_loss" in entry}
    assert dict(shown["lm loss validation"]) == pytest.approx(evaluated, rel=1e-6)
    assert {step for step, _ in shown["lm loss validation ppl"]} == {6}


def tags(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.tries("tensorboard_queue_size")
def test_tensorboard_queue_size(tmp_path: Path) -> None:
    board = TensorBoard(LogConfig(tensorboard_dir=str(tmp_path), tensorboard_queue_size=3), 0)
    assert board._writer.max_queue == 3
    board.close()


def test_all_missing_packages_of_trackers_are_said_at_once(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = ("tensorboard", "wandb", "mlflow", "trackio")
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    asked = {"tensorboard_dir": tmp_path / "board", "wandb_project": "a", "mlflow_experiment": "b", "trackio_project": "c"}
    assert main(product.command(**asked)) == 2
    assert re.findall("got no package ([a-z]+)", capsys.readouterr().err) == [*packages]
    assert main(product.command(**asked, dry_run=True)) == 0
    assert re.findall("warning: --.*got no package ([a-z]+)", capsys.readouterr().out) == [*packages]
