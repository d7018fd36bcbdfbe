"""``--export-hf``: a run that ends leaves a HuggingFace folder, whatever its layout and whether or not it saves."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.model_files import SUMS
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.e2e.product import DP2, DP2_PARAMS, ONE, PP2, SHAPELESS, TP2, ZB_V, Layout, Product, copy_tokens, steps

SHORT: Mapping[str, object] = {"train_iters": 2, "lr_decay_iters": 2}
LAYOUTS = {
    "one": (ONE, {}),
    "tp2 sp, no_shard": (Layout(2, {**TP2.options, "data_parallel_sharding_strategy": "no_shard"}), {}),
    "dp2 optim_grads, tied, in the background": (DP2, {"tie_word_embeddings": True, "async_save": True}),
    "dp2 optim_grads_params, bf16": (DP2_PARAMS, {"bf16": True}),
    "pp2 zb-v": (ZB_V, {}),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.tries("export_hf")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name in ("one", "pp2 zb-v") else []) for name in LAYOUTS])
def test_the_end_of_a_run(name: str, product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same files as ``export`` makes of the last checkpoint, and the same again when there is none."""
    layout, options = LAYOUTS[name]
    saving = product.train(layout, save=tmp_path / "run", export_hf=tmp_path / "hf", **SHORT, **options)
    assert saving.out.endswith(f" exported to {tmp_path / 'hf'}\n")
    assert main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "exported")]) == 0
    assert files(tmp_path / "hf") == files(tmp_path / "exported")
    dtype = "bfloat16" if "bf16" in options else "float32"
    assert f"({dtype})" in capsys.readouterr().out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype
    without = {option: value for option, value in options.items() if option != "async_save"}
    product.train(layout, export_hf=tmp_path / "again", **SHORT, **without)
    assert files(tmp_path / "again") == files(tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "exported", "hf", "run"]


@pytest.mark.long
def test_a_stopped_run_exports_nothing(product: Product, tmp_path: Path) -> None:
    """Until it is resumed and gets to its end."""
    options = {"save": tmp_path / "run", "export_hf": tmp_path / "hf", "lr_decay_iters": 2}
    run = product.start(PP2, train_iters=100_000, **options)
    run.until(lambda: len(steps(tmp_path / "run")) >= 2)
    run.signal(signal.SIGTERM)
    assert "exported" not in run.wait().ok(143).out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    last = steps(tmp_path / "run")[-1]["iteration"]
    for finished in (False, True):
        resumed = product.train(PP2, load=tmp_path / "run", train_iters=last + 1, **options)
        assert resumed.out.endswith(f" exported to {tmp_path / 'hf'}\n")
        says = f" already finished: iteration {last + 1} of {last + 1} in {tmp_path}/run/iter_{last + 1:07d}; only --export-hf "
        assert (says in resumed.out) == finished
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_a_folder_in_use_is_refused_at_the_start(product: Product, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.tex").write_text("years of work")
    ended = product.start(TP2, save=tmp_path / "run", export_hf=tmp_path / "hf").wait()
    assert ended.codes == (1, 1) and not (tmp_path / "run").exists()
    assert f"{tmp_path / 'hf'}: got a folder with thesis.tex, expected no folder, an empty one or an earlier export" in ended.err
    assert files(tmp_path / "hf") == {"thesis.tex": b"years of work"}


@pytest.mark.long
def test_a_failure_at_the_end_is_everybodys(product: Product, tmp_path: Path) -> None:
    run = product.start(DP2, save=tmp_path / "run", export_hf=tmp_path / "hf", train_iters=25)
    run.until(lambda: len(steps(tmp_path / "run")) >= 1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.tex").write_text("years of work")
    ended = run.wait()
    assert ended.codes == (1, 1) and ended.err.count("got a folder with thesis.tex") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    assert (tmp_path / "run" / "iter_0000025").is_dir()


def test_what_belongs_to_the_tokenizer_comes_out_as_it_went_in(product: Product, tmp_path: Path) -> None:
    product.train(export_hf=tmp_path / "first", **SHORT)
    extra = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": [2, 5], "temperature": 0.6}'}
    for name, content in extra.items():
        (tmp_path / "first" / name).write_bytes(content)
    (tmp_path / "first" / SUMS).unlink()  # the files are others than those of the export
    for _ in range(2):  # the second replaces the first
        product.train(init_from_hf=tmp_path / "first", tokenizer_model=tmp_path / "first", export_hf=tmp_path / "second", **SHORT, **SHAPELESS)
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    assert {name: second[name] for name in extra} == extra and first.keys() | {SUMS} == second.keys()
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}
    with safe_open(tmp_path / "second" / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 39


def test_a_run_without_tokenizer_says_so(product: Product, tmp_path: Path) -> None:
    copy_tokens(product.data, tmp_path / "tokens")
    ended = product.train(data_path=tmp_path / "tokens", vocab_size=512, save=tmp_path / "run", export_hf=tmp_path / "hf", **SHORT)
    assert ended.out.endswith(f" exported to {tmp_path / 'hf'}, without a tokenizer: none is known\n")
    assert sorted(files(tmp_path / "hf")) == [SUMS, "config.json", "generation_config.json", "model.safetensors"]
    exported = product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "again").ok()
    assert "warning: no tokenizer is known for this checkpoint" in exported.out and files(tmp_path / "again") == files(tmp_path / "hf")
    given = ["--tokenizer-model", f"{product.data}-tokenizer"]
    product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "again", *given).ok()
    assert AutoTokenizer.from_pretrained(tmp_path / "again")("a statement")["input_ids"][0] == 1
