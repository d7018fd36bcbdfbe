"""What prove trains on is what it has written, its runs are recorded to the bit, and its pool ends as it should."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron_llama.checkpoint.columns import MOMENTS
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.data_check import rows_of_data
from megatron_llama.prove.export_check import rows_of_export
from megatron_llama.prove.materials import Materials, make_materials, samples_of_a_pass
from megatron_llama.prove.pool import WorkerError, WorkerPool
from megatron_llama.prove.reference import NotComparedError
from megatron_llama.prove.resume import other_layout, rows_of_resume
from megatron_llama.prove.run import Recorder, Trained, run, states
from megatron_llama.prove.runs import Runs, reads_of
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import read_examples
from megatron_llama.tune.sft.sft_config import SFTConfig
from safetensors.torch import load_file, save_file

from tests.e2e.product import log, state
from tests.harness import Cluster

MODEL: Mapping[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 280, "seq_length": 24,
    "global_batch_size": 4, "lr": 1e-3, "eval_interval": 2, "eval_iters": 1,
}  # fmt: skip
BLEND = Case("blend", {**MODEL, "data_path": ("0.7", "web", "0.3", "code"), "lora_rank": 2, "bf16": True}, 2)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return make_materials(BLEND, tmp_path_factory.mktemp("materials"), steps=4)


@pytest.fixture(scope="module")
def trained(cluster: Cluster, materials: Materials, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two ranks, four steps."""
    return run(cluster, BLEND, tmp_path_factory.mktemp("trained"), materials, steps=4)


def test_a_blend_is_as_it_was_written(materials: Materials, tmp_path: Path) -> None:
    again = make_materials(BLEND, tmp_path, steps=4)
    for (prefix, documents), other in zip(materials.documents.items(), again.documents, strict=True):
        assert again.documents[other] == documents
        assert Path(f"{prefix}.bin").read_bytes() == Path(f"{other}.bin").read_bytes()
        dataset = IndexedDataset(prefix)
        written = [id for document in documents for id in document]
        assert dataset.tokens(0, dataset.num_tokens).tolist() == written
        assert dataset.lengths.tolist() == list(map(len, documents)) and min(map(len, documents)) < 8
    sizes = [sum(map(len, documents)) for documents in materials.documents.values()]
    assert 1.5 < sizes[0] / sizes[1] < 7 / 3, "each has a little more than its share"
    assert materials.vocab_size == MODEL["vocab_size"] == materials.eod + 1
    ids = {id for documents in materials.documents.values() for document in documents for id in document}
    assert len(ids & set(range(materials.vocab_size * 3 // 4, materials.vocab_size))) > 20, "the last of four shards is used"


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_every_conversation_has_an_answer_where_samples_are_short(loss_on: str, tmp_path: Path) -> None:
    """Or else the run would stop at it: some questions fill a sample alone."""
    case = Case("short", {**MODEL, "seq_length": 16, "chat_template": "llama2", "loss_on": loss_on}, 1, sft=True)
    make_materials(case, tmp_path, steps=2)
    tokenizer = ChatTokenizer(load_tokenizer(tmp_path / "tokenizer"), "llama2")
    read = read_examples([tmp_path / "train.jsonl"], tokenizer, SFTConfig(loss_on=loss_on), seq_length=16)  # type: ignore[arg-type]
    assert not read.problems and len(read) > 8
    with pytest.raises(ConfigError, match=r"--seq-length 8: got questions that fill a sample"):
        make_materials(Case("short", {**MODEL, "seq_length": 8, "chat_template": "llama3"}, 1, sft=True), tmp_path / "shorter", steps=2)


STYLES: dict[str, dict[str, object]] = {style: {"data_format": style, "packing": True} for style in ("messages", "sharegpt", "alpaca", "prompt", "text")}
STYLES |= {name: {"data_format": "messages", "chat_template": name} for name in ("plain", "chatml", "llama2", "llama3")}


@pytest.mark.parametrize("style", STYLES)
def test_conversations_have_the_tokens_and_answers_that_are_known_of_them(style: str, tmp_path: Path) -> None:
    """Of templates that are built in, from transformers."""
    options = STYLES[style]
    written = make_materials(Case(style, {**MODEL, **options}, 1, sft=True), tmp_path, steps=2)
    tokenizer = ChatTokenizer(load_tokenizer(written.tokenizer), options.get("chat_template"))  # type: ignore[arg-type]
    read = read_examples([tmp_path / "train.jsonl"], tokenizer, SFTConfig(data_format=options["data_format"]), seq_length=1000)  # type: ignore[arg-type]
    assert not read.problems and len(read) > 10
    assert [tuple(ids.tolist()) for ids in read.ids] == [talk.ids for talk in written.talks]
    # Nothing predicts the first token.
    assert [mask[1:].tolist() for mask in read.loss_mask] == [[answer > 0 for answer in talk.answers[1:]] for talk in written.talks]
    if "chat_template" in options:
        assert {max(talk.answers) for talk in written.talks} == {1, 2}, "answers are numbered"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "sft"),
    [
        ({"data_path": ("1", "a", "5", "b", "1", "c", "20", "d", "2", "e")}, False),
        ({"data_path": ("a", "b", "a"), "epochs": 1.0}, False),
        ({"seq_length": 64, "on_long_sample": "drop", "loss_on": "last"}, True),
        ({"seq_length": 64, "packing": True, "valid_data": ("own",), "epochs": 0.5}, True),
    ],
    ids=["weights", "one part twice", "conversations", "packed"],
)
def test_passes_end_in_the_last_step_with_a_part_of_a_batch(
    cluster: Cluster, options: dict[str, object], sft: bool, tmp_path: Path
) -> None:
    case = Case("passes", {**MODEL, "num_hidden_layers": 1, "eval_interval": 0, "epochs": 1.6, **options}, 1, sft)
    written = make_materials(case, tmp_path / "written", steps=3)
    found = run(cluster, case, tmp_path / "run", written, steps=3)
    rows = list(rows_of_data(reads_of(found), found.config, written, case))
    assert found.iterations == (1, 2, 3) and found.export is not None, "it came to its end"
    assert 8 < found.config.training.train_samples < 12
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    (length,) = [row for row in rows if row.what == "samples of the run"]
    assert length.bound == 0, length


@pytest.mark.parametrize("passes", [0.5, 1.0, 1.6])
@pytest.mark.parametrize("sizes", [BatchSizes(2), BatchSizes(4), BatchSizes(8, (2, 2, 8))], ids=["two", "four", "growing"])
def test_a_pass_has_as_many_samples_as_the_last_step_needs(passes: float, sizes: BatchSizes) -> None:
    samples = samples_of_a_pass(passes, sizes, STEPS, read_blend(["text"]))
    whole, left = sizes.steps(0, round(passes * samples))
    assert whole == STEPS - 1 and left


def test_a_run_is_recorded_to_the_bit(trained: Trained, materials: Materials) -> None:
    folder = trained.checkpoints[1].parent
    steps = [line for line in log(folder) if "lm_loss" in line]
    assert [line["lm_loss"] for line in steps] == list(trained.losses)
    assert [line["grad_norm"] for line in steps] == list(trained.grad_norms)
    assert trained.validation_losses.keys() == {0, 2, 4} and list(trained.checkpoints) == [1, 2, 3, 4]
    read = states(trained.checkpoints[4])
    saved = state(trained.checkpoints[4])
    moments = {f"optimizer.{kind}.{name}": tensor for kind in MOMENTS for name, tensor in getattr(read, kind).items()}
    every = dict(read.master) | moments
    assert every.keys() == saved.keys() and all(torch.equal(every[name], saved[name].to(every[name].dtype)) for name in saved)
    assert read.exp_avg.keys() == {name for name in read.master if ".lora_" in name} and len(read.exp_avg) == 28
    # Two ranks, a sample in each microbatch: the two halves of four samples.
    rows = [[batch.tokens[:, 0].tolist() for batch in record.steps[0].batches] for record in trained.ranks]
    assert [len(row) for row in rows] == [2, 2] and len({tuple(row) for rank in rows for row in rank}) == 4


def test_a_run_stops_and_goes_on_where_it_is_told_to(cluster: Cluster, trained: Trained, materials: Materials, tmp_path: Path) -> None:
    start = trained.checkpoints[1]
    found = run(cluster, BLEND, tmp_path, materials, start=start, steps=4, until=3)
    assert found.iterations == (2, 3) and found.export is None
    assert found.losses == trained.losses[1:3], "learning rates are those of the whole run"


def test_a_configuration_is_what_it_documents_not_what_was_written_before(trained: Trained, materials: Materials, tmp_path: Path) -> None:
    """A writer that is wrong is wrong in the folder with which the run began, too."""
    assert trained.export is not None
    begun, exported = tmp_path / "begun", tmp_path / "exported"
    for folder in (begun, exported):
        shutil.copytree(trained.export, folder)
        config = json.loads((materials.model / "config.json").read_text()) | {"rms_norm_eps": 0.1, "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config))
    rows = list(rows_of_export(replace(trained, export=exported), replace(materials, model=begun)))
    wrong = [row for row in rows if not row.holds]
    assert [(row.what, row.note) for row in wrong[:-1]] == [("config.json", "rms_norm_eps: 0.1 instead of 1e-05")]
    assert wrong[-1].what == "logits"


def test_logits_that_are_not_compared_are_said(trained: Trained, materials: Materials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_llama.prove.export_check.obstacle", lambda model: "transformers is not installed")
    rows = rows_of_export(trained, materials)
    with pytest.raises(NotComparedError, match="logits with transformers: transformers is not installed"):
        list(rows)


def test_an_export_is_compared_with_the_checkpoint(trained: Trained, materials: Materials) -> None:
    rows = list(rows_of_export(trained, materials))
    assert all(row.holds for row in rows) and {row.what for row in rows} == {"weight", "config.json", "logits"}
    assert trained.export is not None
    weights, config = trained.export / "model.safetensors", trained.export / "config.json"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: states(trained.checkpoints[4]).master[name].bfloat16()}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    wrong = [row for row in rows_of_export(trained, materials) if not row.holds]
    assert [(row.what, row.tensor) for row in wrong] == [("weight", name), ("config.json", None), ("logits", None)]
    assert "rms_norm_eps: 0.1 instead of 1e-05" in wrong[1].note


def test_a_run_of_one_step_is_not_resumed(cluster: Cluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, steps=2)
    with pytest.raises(NotComparedError, match="the run has one step"):
        list(rows_of_resume(runs, Case("one step", {**MODEL, "train_samples": 4}, 1), 0))


def test_the_other_layout_cuts_the_model_otherwise() -> None:
    tensor = other_layout(Case("tp2", {**MODEL, "micro_batch_size": 1, "tensor_model_parallel_size": 2}, 2))
    pipeline = other_layout(Case("pp2", {**MODEL, "micro_batch_size": 1, "pipeline_model_parallel_size": 2}, 4))
    assert tensor is not None and tensor.options["pipeline_model_parallel_size"] == 2 and tensor.world_size == 4
    assert pipeline is not None and pipeline.options["tensor_model_parallel_size"] == 2
    rollback = {"micro_batch_size": 1, "tensor_model_parallel_size": 2, "on_bad_step": "rollback"}
    assert other_layout(Case("it goes back to what is saved", {**MODEL, **rollback}, 2)) is not None
    assert other_layout(Case("one sample", {**MODEL, "global_batch_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1}, 1)) is None


def says_and_fails(place: Place, status: int) -> None:
    print("the rank was here")
    os.write(2, b"and a library said this\n")
    if status:
        sys.stdout.flush()
        os._exit(status)
    raise LookupError("moon")


@pytest.mark.parametrize(("status", "error"), [(0, "LookupError: moon\n"), (3, "died with exit code 3\n")])
def test_what_a_rank_printed_last_follows_its_error(
    status: int, error: str, cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerError) as caught:
        cluster.run(1, says_and_fails, status, output=tmp_path / "said")
    said = caught.value.errors[0]
    assert error in said and {"the rank was here", "and a library said this"} <= set(said.splitlines())
    assert "was here" not in capfd.readouterr().out


class Cycle:
    """It is freed by a garbage collection only."""

    def __init__(self, place: Place) -> None:
        self.itself = self


def made(place: Place) -> int:
    """Leave one, and count those that there are."""
    Cycle(place)
    gc.unfreeze()
    return sum(isinstance(each, Cycle) for each in gc.get_objects())


def test_nothing_of_a_job_stays_with_its_worker(cluster: Cluster) -> None:
    assert [cluster.run(1, made) for _ in range(3)] == [[1]] * 3


def interrupts(place: Place, parent: int, folder: Path) -> None:
    (folder / str(place.rank)).write_text(str(os.getpid()))
    if place.rank == 0:
        os.kill(parent, signal.SIGINT)
    Event().wait()


def rank_of(place: Place) -> int:
    return place.rank


def test_control_c_ends_what_the_workers_do(tmp_path: Path) -> None:
    with WorkerPool() as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(1, interrupts, os.getpid(), tmp_path)
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "0").read_text()), 0)
        assert pool.run(1, rank_of) == [0]


def test_of_a_step_that_is_repeated_after_a_rollback_the_last_time_counts() -> None:
    recorder = Recorder()
    for iteration, loss in ((1, 4.0), (2, 9.0), (2, 8.0), (2, 3.0), (3, 2.0)):
        step = SimpleNamespace(iteration=iteration, loss=loss, grad_norm=1.0, lr=0.1, skipped=False, batches=())
        recorder.on_step(cast(Any, None), cast(Any, step))
    rolls_back = Config(training=TrainingConfig(on_bad_step="rollback"))
    assert [(step.iteration, step.loss) for step in recorder.rank_record(rolls_back).steps] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    repeated = recorder.rank_record(Config()).steps
    assert [step.iteration for step in repeated] == [1, 2, 2, 2, 3], "of a run that must not repeat a step it is seen"
