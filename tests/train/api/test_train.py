"""``ml.train`` as programs call it: options in every form, callbacks, and processes that somebody else has started."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
import yaml
from megatron_llama.checkpoint.background import BackgroundSaver
from megatron_llama.cli import main
from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megatron_llama.launch.launcher import Place

from tests.harness import Cluster, WorkerError
from tests.launcher import Launcher
from tests.parallel.test_waiting import Asked

Options = Mapping[str, Any]


def curve(folder: Path) -> dict[int, float]:
    """The losses in a run's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


@pytest.mark.long
def test_it_is_the_run_of_the_command(options: Options, tmp_path: Path) -> None:
    result = ml.train(options, save=tmp_path / "api", eval_interval=3, eval_iters=1)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["pretrain", *words, "--save", str(tmp_path / "command"), "--eval-interval", "3", "--eval-iters", "1"]) == 0
    assert result.losses == curve(tmp_path / "command") and list(result.losses) == [2, 4, 6]
    lines = [json.loads(line) for line in (tmp_path / "command" / "log.jsonl").read_text().splitlines()]
    assert result.validation_losses == {line["iteration"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert (result.iteration, result.consumed_samples, result.loss) == (6, 24, result.losses[6])
    assert result.checkpoint == tmp_path / "api" / "iter_0000006" and (result.checkpoint / "meta.json").is_file()
    assert result.stopped_by is None and result.export is None
    assert result.grad_norm == next(line["grad_norm"] for line in lines if line["iteration"] == 6 and "grad_norm" in line)


@pytest.mark.long
def test_options_in_every_form_are_the_same_run(options: Options, data: Path, tmp_path: Path) -> None:
    expected = ml.train(options).losses
    config = Config(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
        training=TrainingConfig(seq_length=32, micro_batch_size=1, global_batch_size=4, train_iters=6),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(data_path=(str(data),), split="90,10,0"),
        checkpoint=CheckpointConfig(),
    )
    assert ml.train(config, log_interval=2).losses == expected
    sections = {"training": {"seq_length": 32, "train_iters": 7}, "optimizer": {"lr": 1e-3}}
    rest = {name: value for name, value in options.items() if name not in ("seq_length", "train_iters", "lr")}
    assert ml.train({**sections, **rest}, train_iters=6).losses == expected, "keywords win"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**options, "data_path": str(data), "lr": 5.0}))
    assert ml.train(file, lr=1e-3).losses == expected
    assert ml.train(**options).losses == expected


def test_what_is_wrong_with_options_is_said_at_once() -> None:
    with pytest.raises(ml.UserError) as caught:
        ml.train({"learning_rat": 1, "lr": "fast", "training": {"hidden_size": 8}}, seq_length=2.5, bf16=1)
    said = str(caught.value)
    assert "learning_rat: got an unknown key" in said and "lr: got fast, expected a number" in said
    assert "training.hidden_size: got it under training:" in said
    assert "seq_length: got 2.5, expected an integer" in said and "bf16: got 1, expected true or false" in said
    with pytest.raises(ml.UserError, match="config: got int, expected a Config, a mapping of options"):
        ml.train(5)  # type: ignore[arg-type]


def test_the_lease_outlives_the_process_that_writes(options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That one may be publishing a checkpoint until it has ended."""
    close, held = BackgroundSaver.close, []

    def close_and_look(saver: BackgroundSaver) -> None:
        close(saver)
        held.append([path.name for path in tmp_path.glob("lease.*")])

    monkeypatch.setattr(BackgroundSaver, "close", close_and_look)
    ml.train(options, save=tmp_path, async_save=True)
    assert held == [["lease.1.json"]] and not list(tmp_path.glob("lease.*"))


class Keeps(ml.Callback):
    """Keeps the tensors of each step, and reads them if it should."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads
        self.losses: list[torch.Tensor] = []

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        self.losses.append(step.loss)
        if self.reads:
            float(step.loss)


@pytest.mark.long
def test_a_callback_that_reads_nothing_makes_nobody_wait(options: Options) -> None:
    """Of the operators whose result the host must know there are as many as without it."""
    asked = []
    for callbacks in ([], [Keeps(reads=False)], [Keeps(reads=True)]):
        with Asked() as found:
            ml.train(options, callbacks, train_iters=3)
        asked.append(len(found.found))
    assert asked[0] == asked[1] == asked[2] - 3
    kept = Keeps(reads=False)
    result = ml.train(options, [kept], log_interval=1)
    assert [float(loss) for loss in kept.losses] == list(result.losses.values()), "they stay as they were"


class Asks(ml.Callback):
    """Asks at some steps, on the last rank."""

    def __init__(self, save: int = 0, stop: int = 0) -> None:
        self.save, self.stop, self.saved = save, stop, list[str]()

    def on_save(self, run: ml.Run, path: Path) -> None:
        assert (path / "meta.json").is_file()
        self.saved.append(path.name)

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        if run.rank == run.world_size - 1 and step.iteration == self.save:
            run.save()
        if run.rank == run.world_size - 1 and step.iteration == self.stop:
            run.stop()


def test_a_callback_asks_for_a_checkpoint_and_for_the_end(options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asks = Asks(save=1, stop=3)
    result = ml.train(options, [asks], save=tmp_path, async_save=True)
    assert asks.saved == ["iter_0000002", "iter_0000004"]
    assert result.iteration == 4 and result.stopped_by is None and result.checkpoint == tmp_path / "iter_0000004"
    assert " stopped by a callback after iteration 4\n" in capsys.readouterr().out
    again = ml.train(options, load=tmp_path, save=tmp_path)
    assert again.iteration == 6 and again.losses[6] == ml.train(options).losses[6], "nothing is lost"


def test_a_signal_stops_the_run_and_handlers_are_those_of_before(options: Options, tmp_path: Path) -> None:
    class Terminates(ml.Callback):
        def on_step(self, run: ml.Run, step: ml.Step) -> None:
            if step.iteration == 2:
                signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    result = ml.train(options, [Terminates()], save=tmp_path)
    assert result.stopped_by == signal.SIGTERM and result.iteration == 3
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.long
def test_it_works_in_another_thread(options: Options) -> None:
    found = list[ml.TrainResult]()
    thread = threading.Thread(target=lambda: found.append(ml.train(options)))
    thread.start()
    thread.join()
    assert found[0].losses == ml.train(options).losses


class Raises(ml.Callback):
    """Raises at the third step, on one rank."""

    def __init__(self, error: Exception, rank: int) -> None:
        self.error, self.rank = error, rank

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        if run.rank == self.rank and step.iteration == 3:
            raise self.error


def in_a_group_of_the_program(place: Place, options: Options, folder: Path, error: Exception | None) -> tuple[dict[int, float], int, float]:
    """A run, or two, in a process group that was there before; afterwards it still works."""
    before = list(dist.distributed_c10d._world.pg_map)
    callbacks = [Raises(error, 1)] if error is not None else [Asks(stop=4)]
    try:
        ml.train(options, callbacks, save=folder / "one")
        result = ml.train(options, data_parallel_sharding_strategy="optim_grads_params", save=folder / "two")
    finally:
        assert list(dist.distributed_c10d._world.pg_map) == before
    total = torch.ones(())
    dist.all_reduce(total)
    saved = len(list((folder / "one").glob("iter_*")))
    return dict(result.losses), saved, float(total)


@pytest.mark.long
def test_a_group_of_the_program_is_used_and_left(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    found = cluster.run(2, in_a_group_of_the_program, options, tmp_path, None)
    alone = ml.train(options).losses
    for losses, saved, total in found:
        assert losses == pytest.approx(alone, rel=1e-6) and saved == 1 and total == 2.0


@pytest.mark.long
@pytest.mark.parametrize("error", [RuntimeError("moon"), ml.UserError("moon")], ids=lambda error: type(error).__name__)
def test_an_error_of_a_callback_ends_all_ranks_of_the_group(error: Exception, cluster: Cluster, options: Options, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        cluster.run(2, in_a_group_of_the_program, options, tmp_path, error)
    said = dict(zip((1, 0), _by_rank(str(caught.value)), strict=True))
    assert "moon" in said[1] and "another rank: got an error" in said[0] and "died" not in said[0] + said[1]


def _by_rank(said: str) -> tuple[str, str]:
    one, zero = said.partition("--- rank 1:")[2], said.partition("--- rank 0:")[2]
    return one.partition("--- rank 0:")[0], zero.partition("--- rank 1:")[0]


AGAIN = """
import gc, json, sys
import torch.distributed as dist
import megatron_llama as ml
from megatron_llama.errors import TrainingError

from tests.harness import be_patient

be_patient()
gc.unfreeze()  # as in a program that nobody has forked

class Raises(ml.Callback):
    def __init__(self, error):
        self.error = error

    def on_step(self, run, step):
        if run.rank == 1 and step.iteration == 3:
            raise self.error

options = json.loads(sys.argv[1])
first, again = ml.train(options), ml.train(options, async_save=True, save=sys.argv[2])
assert first.losses == again.losses and not dist.is_initialized()
print("losses", json.dumps(first.losses))
for error in (LookupError("moon"), TrainingError("sun")):  # of the second one all ranks would know, if the run had raised it
    try:
        ml.train(options, [Raises(error)])
    except BaseException as error:
        print("raised", type(error).__name__, str(error).partition(";")[0], dist.is_initialized())
assert gc.get_freeze_count() == 0
"""


@pytest.mark.long
def test_two_launched_processes_call_it_again_and_again(launcher: Launcher, options: Options, tmp_path: Path) -> None:
    """Where one rank raises, both leave the group and can go on."""
    done = launcher.run([words_of(options), tmp_path / "run"], 2, code=AGAIN)
    assert done.codes == (0, 0), done.errs
    alone = ml.train(options).losses
    for rank in range(2):
        losses = json.loads(done.outs[rank].partition("losses ")[2].partition("\n")[0])
        assert {int(iteration): loss for iteration, loss in losses.items()} == pytest.approx(alone, rel=1e-6)
    raised = [[line for line in out.splitlines() if line.startswith("raised")] for out in done.outs]
    assert raised[0] == ["raised LostRankError rank 1: got an error, expected all ranks at work False"] * 2
    assert raised[1] == ["raised LookupError moon False", "raised TrainingError sun False"]


def words_of(options: Options) -> str:
    return json.dumps({**options, "data_path": str(options["data_path"])})


HANGS = """
import json, signal, sys

import megatron_llama as ml

class Hangs(ml.Callback):
    def on_step(self, run, step):
        if run.rank == 1 and step.iteration == 3:
            signal.pause()

ml.train(json.loads(sys.argv[1]), [Hangs()], distributed_timeout_minutes=0.05)
"""


@pytest.mark.long
def test_a_callback_in_which_a_rank_hangs_is_named(launcher: Launcher, options: Options) -> None:
    """Not the part of the step that came before it."""
    done = launcher.run([words_of({**options, "train_iters": 20})], 2, code=HANGS)
    assert done.codes == (1, 1)
    assert all("rank 1 stopped in a callback (iteration 3)" in err for err in done.errs), done.errs


def test_what_a_program_has_frozen_stays_so(options: Options) -> None:
    """A run keeps the garbage collector from its own objects, too, and gives them back."""
    mine = [object()]
    gc.collect()
    gc.freeze()
    ml.train(options, train_iters=1)
    assert not any(each is mine for each in gc.get_objects())
