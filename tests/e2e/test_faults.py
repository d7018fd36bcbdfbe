"""Bad steps: what a run does with a loss that is not finite or a spike, and that nothing of it stays."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.checkpoint.history import History, Skipped
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.stream import TokenStream, split_documents
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.rules.update_rule import AdamW
from megatron_llama.errors import TrainingError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.train.commands.pretrain import SECTIONS
from megatron_llama.train.run.build import open_run
from megatron_llama.train.run.loop import train
from megatron_llama.train.setup.resolve import assemble, check
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.product import (
    DP2,
    GLOBAL_BATCH_SIZE,
    ONE,
    PP2,
    SEQ_LENGTH,
    SHAPELESS,
    TP2,
    VOCAB_SIZE,
    ZB_V,
    Product,
    assert_same_state,
    column,
    copy_dataset,
    exact_curve,
    steps,
)
from tests.harness import Cluster
from tests.ready import ready_for

BAD = 4
"""The step whose samples are poisoned."""
LEFT_OUT = {"iteration": BAD, "first_sample": 24, "last_sample": 31, "reason": "loss", "value": "nan"}


def changed(product: Product, prefix: Path, step: int, samples: slice, tokens: Any) -> Path:
    """The dataset, with other tokens in some samples of a step that reads in file order."""
    copy_dataset(product.data, prefix)
    stream = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r+")
    start = (step - 1) * GLOBAL_BATCH_SIZE
    stream[(start + samples.start) * SEQ_LENGTH + 7 : (start + samples.stop) * SEQ_LENGTH] = tokens
    stream.flush()
    return prefix


@pytest.fixture(scope="module")
def poisoned(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """Options of runs of a model that knows one word which ruins every step in which it is read: one sample of the fourth."""
    folder = tmp_path_factory.mktemp("poisoned")
    product.train(save=folder / "run", train_iters=1, lr=0.0)
    product.run("export", "--load", folder / "run", "--output", folder / "hf").ok()
    stream = np.memmap(f"{product.data}.bin", dtype=np.uint16, mode="r")
    word = next(token for token in range(VOCAB_SIZE) if token not in set(stream.tolist()))
    weights = load_file(folder / "hf" / "model.safetensors")
    weights["model.embed_tokens.weight"][word] = torch.inf
    save_file(weights, folder / "hf" / "model.safetensors", {"format": "pt"})
    (folder / "hf" / "SHA256SUMS").unlink()
    data = changed(product, folder / "docs", BAD, slice(5, 6), word)
    # The word is in every checkpoint of these runs.
    options = {"data_order": "sequential", "lr_decay_style": "constant", "lr": 1e-2, "on_bad_checkpoint": "warn"}
    return {**SHAPELESS, "init_from_hf": folder / "hf", "data_path": data, **options}


def skipped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def skipping(product: Product, poisoned: Mapping[str, object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of eight steps that skips the fourth, and what it printed."""
    folder = tmp_path_factory.mktemp("skipping")
    return folder, product.train(DP2, save=folder, save_interval=1, train_iters=8, on_bad_step="skip", **poisoned).out


@pytest.mark.tries("on_bad_step")
def test_a_skipped_step_leaves_no_trace_in_the_weights(skipping: tuple[Path, str]) -> None:
    folder, printed = skipping
    assert skipped(folder) == [LEFT_OUT]
    assert printed.count(" warning: loss nan at iteration 4: samples 24 to 31 are left out\n") == 1
    assert [(loss is None, norm is None) for loss, norm in zip(column(folder, "lm_loss"), column(folder, "grad_norm"), strict=True)] == [
        (iteration == BAD, iteration == BAD) for iteration in range(1, 9)
    ]
    assert column(folder, "skipped_iterations") == [int(iteration == BAD) for iteration in range(1, 9)]
    assert_same_state(folder / "iter_0000004", folder / "iter_0000003")
    meta = json.loads((folder / "iter_0000008" / "meta.json").read_text())
    assert (meta["optimizer_step"], meta["consumed_samples"]) == (7, 64)
    assert meta["history"] == {"skipped": [LEFT_OUT], "good_losses": [], "bad_in_a_row": 0}


def test_a_pipeline_skips_the_same_step(product: Product, poisoned: Mapping[str, object], skipping: tuple[Path, str], tmp_path: Path) -> None:
    product.train(ZB_V, save=tmp_path, train_iters=6, on_bad_step="skip", **poisoned)
    assert skipped(tmp_path) == [LEFT_OUT]
    losses, expected = column(tmp_path, "lm_loss"), column(skipping[0], "lm_loss")[:6]
    assert losses[BAD - 1] is None and [loss for loss in losses if loss] == pytest.approx([loss for loss in expected if loss], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("interval", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(5, {}, marks=pytest.mark.long),
        (2, {"async_save": True, "save_retain": 1}),
        (2, {"optimizer_offload": "exact", "offload_speculative": True}),
    ],
    ids=["to a checkpoint", "to the start", "to one that is being written", "with the optimizer on the host"],
)
def test_a_run_that_goes_back_leaves_the_bad_samples_out(
    interval: int, more: dict[str, object], product: Product, poisoned: Mapping[str, object], skipping: tuple[Path, str], tmp_path: Path
) -> None:
    """From the fourth step on it is the run that skipped, a step ahead; also when it is interrupted behind the bad step."""
    options = {"save": tmp_path, "load": tmp_path, "save_interval": interval, "on_bad_step": "rollback", **poisoned, **more}
    printed = product.train(DP2, train_iters=5, **options).out
    assert printed.count(f" back to iteration {BAD - 2 if interval == 2 else 0}\n") == 1
    product.train(DP2, train_iters=7, **options)
    assert skipped(tmp_path) == [LEFT_OUT]
    names = ("consumed_samples", "lm_loss", "grad_norm")
    ours, theirs = ([tuple(entry[name] for name in names) for entry in steps(folder)] for folder in (tmp_path, skipping[0]))
    assert ours == theirs[: BAD - 1] + theirs[BAD:]
    assert_same_state(tmp_path / "iter_0000007", skipping[0] / "iter_0000008")


@pytest.mark.long
@pytest.mark.parametrize("last_is_bad", [False, True], ids=["inside", "last"])
def test_an_epoch_uses_each_sample_once_or_leaves_it_out(
    last_is_bad: bool, product: Product, poisoned: Mapping[str, object], tmp_path: Path
) -> None:
    """Also where the bad step is the last one, which the end of the run then leaves out; and when the run is interrupted, or started
    again at its end."""
    dataset = IndexedDataset(str(poisoned["data_path"]))
    length = len(TokenStream(dataset, split_documents("90,10,0", dataset.num_documents)[0], SEQ_LENGTH, VOCAB_SIZE))
    samples = BAD * GLOBAL_BATCH_SIZE if last_is_bad else 50
    options = {**poisoned, "epochs": samples / length, "train_iters": None, "lr_decay_iters": None, "lr_decay_style": "linear"}
    options |= {"save": tmp_path / "run", "load": tmp_path / "run", "save_interval": 2, "on_bad_step": "rollback", "eval_interval": 9}
    printed = product.train(**options, exit_interval=5).out + product.train(**options).out
    planned = -(-samples // GLOBAL_BATCH_SIZE)
    assert printed.count(f" samples in a pass, {planned} steps in all\n") == 2, "the learning rate knows nothing of the bad step"
    done = steps(tmp_path / "run")
    used = [sample for entry in done for sample in range(entry["consumed_samples"] - entry["global_batch_size"], entry["consumed_samples"])]
    assert used == [sample for sample in range(samples) if not 24 <= sample <= 31]
    assert [entry["iteration"] for entry in done] == list(range(1, planned))
    assert column(tmp_path / "run", "learning_rate") == pytest.approx([1e-2 * (planned - n) / planned for n in range(planned - 1)])
    last = planned - 1
    assert f" validation loss at iteration {last} " in printed and (tmp_path / "run" / f"iter_{last:07d}").is_dir()


@pytest.mark.long
def test_zenflow_that_goes_back_has_never_read_the_bad_samples(product: Product, poisoned: Mapping[str, object], tmp_path: Path) -> None:
    """The run is that on data without them: nothing of the bad step, nor of the ones behind it, is pending or has been chosen by."""
    first, behind = 24 * SEQ_LENGTH, 32 * SEQ_LENGTH
    for name in ("with", "without"):
        copy_dataset(poisoned["data_path"], tmp_path / name)
        stream = np.memmap(tmp_path / f"{name}.bin", dtype=np.uint16, mode="r+")
        if name == "without":
            stream[first : first - behind] = stream[behind:].copy()
        else:
            stream[first] = stream[behind]  # which the last sample before them has to predict
        stream.flush()
    zenflow = {"optimizer_offload": "zenflow", "zenflow_topk_ratio": 0.25, "zenflow_update_interval": 2, "zenflow_overlap_step": True}
    options = {**poisoned, "save_interval": 3, "train_iters": 8, "on_bad_step": "rollback", **zenflow}
    for name in ("with", "without"):
        product.train(DP2, save=tmp_path / name, **{**options, "data_path": tmp_path / name})
    assert skipped(tmp_path / "with") == [LEFT_OUT] and not (tmp_path / "without" / "skipped.jsonl").exists()
    for name in ("lm_loss", "grad_norm"):
        assert column(tmp_path / "with", name) == column(tmp_path / "without", name)
    assert_same_state(tmp_path / "with" / "iter_0000008", tmp_path / "without" / "iter_0000008")


@pytest.mark.tries("max_bad_steps")
@pytest.mark.long
def test_too_many_bad_steps_end_the_run(product: Product, poisoned: Mapping[str, object], tmp_path: Path) -> None:
    data = changed(product, tmp_path / "docs", 2, slice(0, 60), np.memmap(f"{poisoned['data_path']}.bin", dtype=np.uint16)[(24 + 5) * 32 + 8])
    for policy, last in (("skip", 4), ("rollback", 2)):
        options = {**poisoned, "data_path": data, "max_bad_steps": 2, "save_interval": 1, "on_bad_step": policy}
        ended = product.start(DP2, save=tmp_path / policy, train_iters=9, **options).wait()
        assert ended.codes == (1, 1)
        assert ended.err.startswith("error: bad steps: got 3 in a row, the last: loss nan, expected at most 2 (--max-bad-steps); "), (ended.err)
        assert [entry["iteration"] for entry in skipped(tmp_path / policy)] == ([2, 3, 4] if last == 4 else [2, 2, 2])
        assert [entry["first_sample"] for entry in skipped(tmp_path / policy)] == [8, 16, 24]


FACTOR, WINDOW, SPIKE = 1.1, 3, 19


@pytest.fixture(scope="module")
def noisy(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """Options of runs that read noise in one step, when they have learned what text is like."""
    noise = np.random.default_rng(1).integers(0, VOCAB_SIZE, GLOBAL_BATCH_SIZE * SEQ_LENGTH - 7)
    data = changed(product, tmp_path_factory.mktemp("noisy") / "docs", SPIKE, slice(0, GLOBAL_BATCH_SIZE), noise)
    spikes = {"loss_spike_factor": FACTOR, "loss_spike_window": WINDOW}
    return {"data_order": "sequential", "data_path": data, "lr_decay_style": "constant", "lr": 1e-2, "train_iters": 22, **spikes}


@pytest.mark.tries("loss_spike_factor", "loss_spike_window")
@pytest.mark.long
def test_a_loss_spike_is_what_the_manual_says(product: Product, noisy: Mapping[str, object], tmp_path: Path) -> None:
    """Found on the device, with the means of good steps, over an interruption between them and the spike."""
    options = {**noisy, "on_bad_step": "skip"}
    product.train(DP2, save=tmp_path / "straight", save_interval=1, **options)
    good: list[float] = []
    found = []
    for entry in steps(tmp_path / "straight"):
        if len(good) >= WINDOW and entry["lm_loss"] > FACTOR * sum(good[-WINDOW:]) / WINDOW:
            found.append((entry["iteration"], entry["lm_loss"]))
        else:
            good.append(entry["lm_loss"])
    assert [at for at, _ in found] == [SPIKE]
    assert [(entry["iteration"], entry["value"], entry["reason"]) for entry in skipped(tmp_path / "straight")] == [(*found[0], "loss spike")]
    assert_same_state(*(tmp_path / "straight" / f"iter_00000{at}" for at in (SPIKE, SPIKE - 1)))
    for last in (SPIKE - 1, 22):
        product.train(DP2, save=tmp_path / "resumed", load=tmp_path / "resumed", **{**options, "train_iters": last})
    assert exact_curve(tmp_path / "resumed") == exact_curve(tmp_path / "straight")
    assert_same_state(tmp_path / "resumed" / "iter_0000022", tmp_path / "straight" / "iter_0000022")


@pytest.mark.long
def test_a_loss_spike_stops_a_run_that_is_to_stop(product: Product, noisy: Mapping[str, object], tmp_path: Path) -> None:
    ended = product.start(ONE, save=tmp_path, **noisy).wait()
    assert ended.codes == (1,) and ended.err.startswith(f"error: loss spike at iteration {SPIKE}: got ")
    assert ", 1.1 times the mean of the last 3 good steps (--loss-spike-factor); lower --lr" in ended.err
    assert product.train(**{**noisy, "loss_spike_factor": None}).out, "without the factor nothing is a spike"


def test_steps_begin_behind_what_is_left_out() -> None:
    """Also in a run with another batch size, whose steps do not meet the ranges exactly."""
    history = History(tuple(Skipped(1, first, last, "loss", 1.0) for first, last in ((16, 23), (24, 31), (40, 47))))
    assert [history.first_sample(at, lambda _: 8) for at in (0, 8, 9, 16, 30, 32, 33, 47, 48)] == [0, 8, 32, 32, 32, 32, 48, 48, 48]
    assert history.first_sample(0, lambda _: 17) == 48, "17 samples fit nowhere between the ranges"


@pytest.mark.tries("log_straggler")
@pytest.mark.long
def test_the_slowest_rank_is_named(product: Product, tmp_path: Path) -> None:
    """Seven blocks and the head take longer than one block, whoever else uses the machine."""
    uneven = {"num_layers": 8, "pipeline_layer_split": (1, 7), "train_iters": 12, "log_interval": 4}
    printed = product.train(PP2, save=tmp_path / "on", log_straggler=True, **uneven).out
    for entry in steps(tmp_path / "on"):
        assert entry["slowest_rank"] == 1
        assert 0 < entry["compute_ms_min"] < entry["compute_ms_median"] < entry["compute_ms_max"] <= entry["elapsed_ms"]
        assert entry["compute_ms_median"] == (entry["compute_ms_min"] + entry["compute_ms_max"]) / 2
        assert entry["elapsed_ms"] - entry["exposed_comm_ms"] == pytest.approx(entry["compute_ms_min"], rel=1e-9), "rank 0"
    assert len(re.findall(r" \| compute per rank \(ms\): min \S+, median \S+, max \S+ \(rank 1\)\n", printed)) == 3
    quiet = product.train(PP2, save=tmp_path / "off", **uneven).out
    assert "compute per rank" not in quiet and "slowest_rank" not in steps(tmp_path / "off")[0]


def with_a_faulty_memory(place: Place, argv: list[str]) -> str:
    """Train; on rank 1 a bit of a norm flips right after its third update. Returns the error."""
    config = check(assemble(parse(argv, SECTIONS, aliases=MEGATRON)), place.world_size, needs_data=True).config
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    sound, updates = AdamW.step, 0

    def faulty(self: AdamW, bucket: int, grad: Tensor, **named: Any) -> Future:
        nonlocal updates
        done = sound(self, bucket, grad, **named)
        is_norm = not self._shards[bucket].kind.decay
        updates += is_norm
        if place.rank == 1 and is_norm and updates == 3:
            self._masters[bucket][5:6].view(torch.int32).bitwise_xor_(1 << 20)
        return done

    AdamW.step = faulty  # type: ignore[assignment]
    try:
        with open_run(ready_for(config, mesh.world), mesh) as built:
            train(built)
    except TrainingError as error:
        return str(error)
    finally:
        AdamW.step = sound  # type: ignore[method-assign]
    return ""


@pytest.mark.tries("check_weight_hash_across_dp_replicas_interval")
@pytest.mark.long
def test_a_flipped_bit_ends_the_run(product: Product, cluster: Cluster) -> None:
    """At the next comparison, on all ranks; nobody notices without one."""
    for interval in (2, None):
        argv = product.command(vocab_size=VOCAB_SIZE, check_weight_hash_across_dp_replicas_interval=interval, **TP2.options)[1:]
        for said in cluster.run(2, with_a_faulty_memory, argv):
            start = "model.norm.weight (master) at iteration 4, element 5: got "
            assert said.startswith(start) if interval else said == "", said
