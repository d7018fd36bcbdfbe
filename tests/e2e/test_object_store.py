"""Checkpoints behind a URL. ``file://`` goes the same way as an object store's: no renames, no links, whole objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import megatron_llama as ml
import pytest
from megatron_llama.checkpoint import checkpoint_dir
from megatron_llama.checkpoint.storage_paths import copy_files, is_remote, local_copy, storage_path
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer

from tests.e2e.product import DP2, EVALUATED, ONE, Layout, Product, assert_same_state, exact_curve


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "background"),
    [pytest.param(ONE, {}, id="one process"), pytest.param(DP2, {"async_save": True}, id="dp 2 in the background")],
)
def test_a_run_that_saves_to_a_url(layout: Layout, background: dict, product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    expected, folder, work = straight("one" if layout is ONE else "dp2 optim_grads"), tmp_path / "bucket" / "run", tmp_path / "work"
    work.mkdir()
    url = f"file://{folder}"
    options = {"save_interval": 1, "save_retain": 2, **background, **EVALUATED}
    for until in (3, 6):
        command = product.command(**layout.options, save=url, load="auto", **options, train_iters=until)
        product.launcher.run(command, layout.processes, cwd=work).ok()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["iter_0000005", "iter_0000006", "latest_checkpointed_iteration.txt", "tokenizer"]
    )
    assert_same_state(folder / "iter_0000006", expected / "iter_0000006")
    assert exact_curve(work / "run") == exact_curve(expected), "lines of the log are kept in the working directory"
    assert "verified: " in product.run("inspect", "checkpoint", url, "--verify").ok().out
    product.run("export", "--load", url, "--output", tmp_path / "hf").ok()
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    said = [product.run("generate", "--load", load, "--prompt", "The", "--max-new-tokens", 4).ok().out for load in (url, expected)]
    assert said[0] == said[1]
    (folder / "tokenizer" / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    model = ml.load(url, "trained")
    assert ChatTokenizer(model.tokenizer).template.source == BUILT_IN["chatml"], "files beside a tokenizer are there as long as the model"


def test_folders_in_folders_go_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "one.bin").write_bytes(b"\x00\xff")
    (tmp_path / "run" / "logs" / "two.txt").write_text("words")
    store = storage_path("memory://bucket/run")
    copy_files(tmp_path / "run", store)
    with local_copy(store) as folder:
        assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
            "one.bin": b"\x00\xff",
            "logs/two.txt": b"words",
        }
    assert not folder.exists()


@pytest.mark.long
def test_what_a_killed_save_left_does_not_count_and_goes(product: Product, tmp_path: Path) -> None:
    """The file without which a checkpoint does not count is written last."""
    url = f"file://{tmp_path}/run"
    product.launcher.run(product.command(save=url, train_iters=2, save_interval=1), cwd=tmp_path).ok()
    newest = storage_path(url) / "iter_0000002"
    (newest / "meta.json").unlink()
    assert is_remote(newest) and checkpoint_dir.latest(url) == newest.parent / "iter_0000001"
    checkpoint_dir.tidy(url)
    assert not newest.exists() and (newest.parent / "iter_0000001").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://bucket/run", "expected a path or a URL; give a path"),
        ("s3://bucket/run", r"expected packages .*; pip install '\.\[fsspec\]'"),
    ],
)
def test_a_url_that_cannot_be_read(url: str, message: str, product: Product) -> None:
    refused = product.start(save=url, load="auto").wait()
    assert refused.codes == (1,) and re.search(message, refused.err) and "Traceback" not in refused.err
