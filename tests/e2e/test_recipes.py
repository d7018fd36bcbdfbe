"""How long a run is, what its batches are made of, and how it ends before its time."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter

from tests.e2e.product import (
    DP2,
    EVALUATED,
    ONE,
    PP2,
    Product,
    assert_same_curve,
    column,
    copy_dataset,
    copy_tokens,
    exact_curve,
    log,
    words,
)

RAMP = {"rampup_batch_size": (4, 4, 16), "global_batch_size": 12, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def halves(product: Product, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The dataset in two."""
    folder, whole = tmp_path_factory.mktemp("halves"), IndexedDataset(product.data)
    middle = whole.num_documents // 2
    for name, documents in (("a", range(middle)), ("b", range(middle, whole.num_documents))):
        copy_dataset(product.data, folder / name)
        with IndexedDatasetWriter(folder / name, whole.dtype) as writer:
            for document in documents:
                writer.add(whole.tokens(whole.document_start(document), whole.document_start(document + 1)))
    shutil.copytree(f"{product.data}-tokenizer", folder / "docs-tokenizer")
    return folder / "a", folder / "b"


@pytest.mark.tries("rampup_batch_size", "train_samples", "exit_interval")
@pytest.mark.long
def test_blends_and_growing_batches_are_resumed_exactly(product: Product, halves: tuple[Path, Path], tmp_path: Path) -> None:
    """Stopped by --exit-interval under data parallelism, gone on as a pipeline: the same samples, step by step."""
    options = {**RAMP, **EVALUATED, "data_path": (0.75, halves[0], "0.25", halves[1]), "train_iters": None, "train_samples": 60}
    product.train(save=tmp_path / "straight", **options)
    assert column(tmp_path / "straight", "global_batch_size") == [4, 4, 8, 12, 12, 12]
    assert column(tmp_path / "straight", "consumed_samples") == [4, 8, 16, 28, 40, 52]
    folder = tmp_path / "stopped"
    stopped = product.train(DP2, save=folder, exit_interval=3, **options)
    assert stopped.out.endswith(" stopped by --exit-interval after iteration 3\n") and (folder / "iter_0000003").is_dir()
    product.train(PP2, save=folder, load=folder, **options)
    assert_same_curve(folder, tmp_path / "straight")


@pytest.mark.long
def test_weights_decide_what_a_blend_is(product: Product, halves: tuple[Path, Path], tmp_path: Path) -> None:
    """A part of weight 1 beside one of a millionth is that part alone; without weights it is something else."""
    a, b = halves
    curves = {}
    for name, path in {"alone": (a,), "almost": (1, a, 1e-6, b), "even": (1, a, 1, b), "by size": (a, b)}.items():
        product.train(save=tmp_path / name, data_path=path, train_iters=2)
        curves[name] = exact_curve(tmp_path / name)
    assert curves["almost"] == curves["alone"] != curves["even"] and curves["by size"] != curves["alone"]


def test_parts_of_a_blend_have_one_vocabulary(product: Product, halves: tuple[Path, Path], tmp_path: Path) -> None:
    copy_tokens(halves[0], tmp_path / "c")
    (tmp_path / "c.meta.json").write_text('{"vocab_size": 400, "eod": 2}')
    refused = product.start(ONE, data_path=(1, halves[0], 1, tmp_path / "c")).wait()
    says = f"{tmp_path}/c.meta.json vocab_size: got 400, expected 512, as of {halves[0]}; preprocess all datasets of a blend with one"
    assert set(refused.codes) == {1} and says in refused.err


def test_the_plan_says_how_batches_grow(product: Product) -> None:
    planned = product.run(*product.command(**{**RAMP, "train_iters": None, "train_samples": 60}), "--dry-run").ok().out
    assert (
        "; 384 tokens a step, 32 a sample\nramp-up         4 samples, 4 more at a time, to 12 over 16 samples\n  first steps   2 microbatches; "
        in planned
    )
    piped = {**RAMP, "train_iters": None, "train_samples": 60, "pipeline_model_parallel_size": 2, "world_size": 2, "pipeline_schedule": "gpipe"}
    sizes = {}
    for name, changes in {
        "growing": {},
        "small": {"rampup_batch_size": None, "global_batch_size": 4},
        "full": {"rampup_batch_size": None},
    }.items():
        lines = product.run(*product.command(**{**piped, **changes}), "--dry-run").ok().out
        sizes[name] = max(re.findall(r"with the state (\S+ MiB)", lines), key=lambda size: float(size.split()[0]))
        if name == "growing":
            [first, full] = re.findall(r"most has (\S+ MiB), at full size (\S+ MiB)", lines)[0]
    assert (first, full, full) == (sizes["small"], sizes["full"], sizes["growing"]) and first != full


@pytest.mark.long
@pytest.mark.tries("exit_duration_in_mins")
def test_a_run_ends_when_its_time_is_over(product: Product, tmp_path: Path) -> None:
    ended = product.train(DP2, save=tmp_path, train_iters=100_000, exit_duration_in_mins=0.02)
    last = log(tmp_path)[-1]["iteration"]
    assert ended.out.endswith(f" saved {tmp_path}/iter_{last:07d}\n stopped by --exit-duration-in-mins after iteration {last}\n")
    assert 0 < last < 100_000


@pytest.mark.long
@pytest.mark.tries("z_loss_weight")
def test_z_loss_is_trained_and_not_printed(product: Product, tmp_path: Path) -> None:
    for name, weight in (("without", 0.0), ("with", 0.1)):
        product.train(save=tmp_path / name, train_iters=2, lr=0.0, z_loss_weight=weight, **EVALUATED)
    without, with_ = tmp_path / "without", tmp_path / "with"
    assert column(with_, "lm_loss") == column(without, "lm_loss")
    assert [entry.get("validation_loss") for entry in log(with_)] == [entry.get("validation_loss") for entry in log(without)]
    assert all(ours > 1.01 * theirs for ours, theirs in zip(column(with_, "grad_norm"), column(without, "grad_norm"), strict=True))


@pytest.mark.long
@pytest.mark.tries("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
def test_losses_of_routers_are_trained_and_logged_by_themselves(product: Product, tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "train_iters": 2, "lr": 0.0}
    losses = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 1.0}
    product.train(save=tmp_path / "without", **experts, **EVALUATED)
    said = product.train(DP2, save=tmp_path / "with", **experts, **losses, **EVALUATED).out
    without, with_ = tmp_path / "without", tmp_path / "with"
    assert "routers     global_aux_loss x 1, a forward pass more for each step, z-loss x 1\n" in said
    assert " load_balancing_loss: 1." in said
    assert column(with_, "lm_loss") == pytest.approx(column(without, "lm_loss"), rel=1e-6)
    evaluations = [[entry["validation_loss"] for entry in log(folder) if "validation_loss" in entry] for folder in (with_, without)]
    assert len(evaluations[0]) > 1 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
    assert not any(f"validation_{name}" in entry for entry in log(with_) for name in ("load_balancing_loss", "z_loss", "experts/entropy"))
    loads = [[column(folder, f"experts/{name}") for name in ("largest_load", "entropy")] for folder in (with_, without)]
    assert loads[0] == loads[1] and min(loads[0][0]) > 1 > max(loads[0][1])
    assert all(1 <= value < 2 for value in column(with_, "load_balancing_loss")) and all(value > 0 for value in column(with_, "z_loss"))
    assert all(ours > 1.01 * theirs for ours, theirs in zip(column(with_, "grad_norm"), column(without, "grad_norm"), strict=True))


@pytest.mark.tries("profile", "profile_step_start", "profile_step_end", "profile_ranks", "profile_dir")
@pytest.mark.long
def test_some_steps_of_some_ranks_are_traced(product: Product, tmp_path: Path) -> None:
    """One forward pass of each microbatch of each traced step, no more; rank 0 is not asked."""
    folder = tmp_path / "traces"
    options = {"profile": True, "profile_step_start": 2, "profile_step_end": 4, "profile_ranks": 1, "profile_dir": folder}
    assert product.start(DP2, **options).wait().codes == (0, 0)  # torch's profiler writes to stderr
    assert [path.name for path in folder.iterdir()] == ["rank-1.trace.json.gz"]
    events = json.loads(gzip.decompress((folder / "rank-1.trace.json.gz").read_bytes()))["traceEvents"]
    names = Counter(event.get("name") for event in events)
    assert names["_Lookup"] == names["_LookupBackward"] == 2 * 2 and names["_Linear"] == names["_LinearBackward"] > 0
    assert any(event.get("name") == "[memory]" for event in events)


@pytest.mark.long
def test_tracing_ends_with_the_run(product: Product, tmp_path: Path) -> None:
    ended = product.start(profile=True, profile_step_start=5, profile_step_end=100, profile_dir=tmp_path).wait()
    assert ended.codes == (0,) and ended.out.endswith(f" traced iterations 6 to 6: {tmp_path}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.trace.json.gz"]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Of a .wandb file: a header of 7 bytes, then LevelDB's log, records in parts that end with blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.tries("wandb_project", "wandb_exp_name", "wandb_save_dir")
@pytest.mark.long
def test_weights_and_biases_without_a_network(product: Product, tmp_path: Path) -> None:
    """The run that wandb keeps on this machine has the project, the name, the options and every number. It goes on when the training is
    resumed."""
    from wandb.proto import wandb_internal_pb2

    options = words({"wandb_project": "llamas", "wandb_exp_name": "small", "wandb_save_dir": tmp_path})
    for last in (3, 5):
        command = [*product.command(save=tmp_path / "run", load="auto", train_iters=last, **EVALUATED), *options]
        assert product.launcher.run(command, environ={"WANDB_MODE": "offline"}).codes == (0,)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    found: dict[str, list[float]] = {"lm_loss": [], "validation_loss": []}
    runs = []
    for data in (data for file in files for data in wandb_records(file.read_bytes())):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("run"):
            assert (record.run.project, record.run.display_name) == ("llamas", "small")
            runs.append(record.run.run_id)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if name in found:
                found[name].append(json.loads(item.value_json))
    assert len(files) == 2 and len(runs) >= 2 and len(set(runs)) == 1
    assert found["lm_loss"] == column(tmp_path / "run", "lm_loss")
    assert found["validation_loss"] == [entry["validation_loss"] for entry in log(tmp_path / "run") if "validation_loss" in entry]
