"""What a trained model is for: evaluating, generating, leaving for HuggingFace and coming back from there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.train.commands import evaluate
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.product import DP2_PARAMS, SEQ_LENGTH, SHAPELESS, TP2, Layout, Product, Refuse, column, log, state, words
from tests.launcher import Finished

PROMPT, NEW = "The statement is", 16


@dataclass(frozen=True)
class Trained:
    """A run of two processes, and its export."""

    folder: Path
    hf: Path
    validation: float
    """The last validation loss of the run."""
    exported: Finished


@pytest.fixture(scope="module")
def trained(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    product.train(TP2, save=folder / "run", train_iters=20, lr_decay_iters=20, lr=1e-2, eval_interval=20, eval_iters=0)
    exported = product.run("export", "--load", folder / "run", "--output", folder / "hf").ok()
    return Trained(folder / "run", folder / "hf", log(folder / "run")[-1]["validation_loss"], exported)


def evaluation(product: Product, layout: Layout, source: str, folder: Path, **changes: object) -> tuple[int, float]:
    """Iteration and loss that ``evaluate`` prints."""
    data = {"data_path": product.data, "split": "90,10,0", "eval_iters": 0, "micro_batch_size": 2, "global_batch_size": 8}
    argv = ["evaluate", *words({source: folder, **data, **layout.options, **changes})]
    printed = product.launcher.run(argv, layout.processes).ok().out
    match = re.search(r"validation loss at iteration (\d+) .* lm loss value: (\S+) ", printed)
    assert match is not None and printed.count("\n") == 1, printed
    return int(match[1]), float(match[2])


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(1, {}), TP2], ids=["one process", "tp2 sp"])
def test_evaluate_finds_the_loss_of_the_run(layout: Layout, product: Product, trained: Trained) -> None:
    assert evaluation(product, layout, "load", trained.folder) == (20, pytest.approx(trained.validation, rel=1e-6))


@pytest.mark.long
def test_evaluate_reads_one_checkpoint_and_huggingface_folders(product: Product, trained: Trained) -> None:
    one = Layout(1, {})
    assert evaluation(product, one, "load", trained.folder / "iter_0000020") == (20, pytest.approx(trained.validation, rel=1e-6))
    assert evaluation(product, one, "init_from_hf", trained.hf) == (0, pytest.approx(trained.validation, rel=1e-6))


def expected_loss(hf: Path, ids: list[int], length: int) -> float:
    """The mean loss that transformers has for every token but the first, in windows of ``length``."""
    model = AutoModelForCausalLM.from_pretrained(hf)
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = torch.tensor(ids[start : start + length + 1])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits.double(), window[1:], reduction="sum"))
    return total / (len(ids) - 1)


def assert_measured(printed: str, hf: Path, ids: list[int], length: int) -> None:
    """That ``evaluate`` has counted every token once, and found the loss of transformers."""
    match = re.search(r"lm loss value: (\S+) .*PPL: (\S+) \| validation tokens: (\d+) ", printed)
    assert match is not None, printed
    loss = expected_loss(hf, ids, length)
    assert int(match[3]) == len(ids) - 1
    assert float(match[1]) == pytest.approx(loss, rel=1e-6) and float(match[2]) == pytest.approx(math.exp(loss), rel=1e-5)


def ids_of(hf: Path, texts: Sequence[str]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(hf)
    return [id for text in texts for id in (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)]


DP2_OF_3 = Layout(2, {"micro_batch_size": 3, "seq_length": 20})


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [Layout(1, {}), Layout(1, {"seq_length": 20}), TP2, DP2_OF_3], ids=["model's length", "20", "tp2 sp", "dp2 20"]
)
def test_evaluate_counts_every_token_of_a_text_once(layout: Layout, product: Product, trained: Trained, tmp_path: Path) -> None:
    """Its tail too, which is a shorter window."""
    texts = product.texts[:13]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    argv = ["evaluate", "--load", trained.hf, "--text", tmp_path / "held-out.jsonl", *words(layout.options)]
    printed = product.launcher.run(argv, layout.processes).ok().out
    ids = ids_of(trained.hf, texts)
    length = int(str(layout.options.get("seq_length", SEQ_LENGTH)))
    assert (len(ids) - 1) % length, "there is a tail"
    assert_measured(printed, trained.hf, ids, length)


@pytest.mark.parametrize("options", [{}, {"seq_length": 32}, {"tensor_model_parallel_size": 1, "eval_iters": None}], ids=str)
def test_evaluate_reads_a_text_that_is_shorter_than_a_window(
    options: dict[str, object], trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "The statement is"}\n')
    assert main(["evaluate", "--load", str(trained.hf), "--text", str(tmp_path / "short.jsonl"), *words(options)]) == 0
    ids = ids_of(trained.hf, ["The statement is"])
    assert 3 < len(ids) < SEQ_LENGTH
    assert_measured(capsys.readouterr().out, trained.hf, ids, SEQ_LENGTH)


@pytest.mark.long
def test_evaluate_counts_every_token_of_a_split_in_windows_of_the_model(
    product: Product, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless --eval-iters says what a run says with it."""
    command = ["evaluate", "--load", str(trained.hf), "--data-path", str(product.data), "--split", "90,10,0", "--micro-batch-size", "4"]
    assert main(command) == 0
    dataset = IndexedDataset(product.data)
    first = dataset.document_start(round(0.9 * dataset.num_documents))
    ids = [int(id) for id in dataset.tokens(first, dataset.num_tokens)]
    assert_measured(capsys.readouterr().out, trained.hf, ids, SEQ_LENGTH)
    for given, samples in (("0", (len(ids) - 1) // SEQ_LENGTH), ("2", 8)):
        assert main([*command, "--eval-iters", given]) == 0
        assert f"validation tokens: {samples * SEQ_LENGTH} " in capsys.readouterr().out


def test_evaluate_refuses_options_of_training(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    unused = ("--lr", "--save", "--dry-run", "--optimizer-offload", "--data-parallel-sharding-strategy", "--lora-rank", "--eval-interval")
    assert main(["evaluate", "--load", str(trained.hf), "--text", "x", *(word for name in unused for word in (name, "1"))]) == 2
    said = capsys.readouterr().err
    assert all(f"{name}: got an unknown flag" in said or f"{name}: got an option" in said for name in unused), said


@pytest.mark.long
def test_evaluate_takes_text_or_a_dataset(product: Product, refuse: Refuse, trained: Trained) -> None:
    both = refuse(["evaluate", "--load", trained.hf, "--text", "x", "--data-path", product.data], code=2)
    assert "--data-path: got given with --text" in both
    neither = refuse(["evaluate", "--load", trained.hf], code=2)
    assert "--data-path, --text: got neither, expected one of them; give --data-path PREFIX" in neither


def test_tasks_need_an_extra_and_go_with_nothing_else(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", "--load", str(trained.hf), "--tasks", "hellaswag"]
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    assert main(command) == 2
    assert (capsys.readouterr().err == "error: --tasks: got no package lm_eval, expected it installed; pip install '.[lm-eval]' in the clone\n")
    monkeypatch.setattr(evaluate, "find_spec", lambda name: True)
    for given, says in (
        (("--text", "x", "--eval-iters", "1"), "--text, --eval-iters: got given with --tasks"),
        (("--limit", "2.5"), "--limit: got 2.5, expected a number of questions, or a share of them below 1"),
        (("--num-fewshot", "-1"), "--num-fewshot: got -1, expected 0 or more"),
        (("--output", str(trained.hf)), f"--output: got the folder {trained.hf}, expected a JSON file"),
    ):
        assert main([*command, *given]) == 2
        assert says in capsys.readouterr().err
    assert main(["evaluate", "--load", str(trained.hf), "--text", "x", "--limit", "3"]) == 2
    assert "--limit: got given without --tasks" in capsys.readouterr().err


@pytest.mark.tries("init_from_hf")
def test_training_goes_on_from_a_huggingface_folder(product: Product, trained: Trained, tmp_path: Path) -> None:
    product.train(TP2, init_from_hf=trained.hf, save=tmp_path, train_iters=2, eval_interval=2, eval_iters=0, **SHAPELESS)
    assert log(tmp_path)[0]["validation_loss"] == pytest.approx(trained.validation, rel=1e-6)
    assert column(tmp_path, "lm_loss")[0] < log(tmp_path)[0]["validation_loss"] + 0.5, "from scratch it is 6.2"


def generated(product: Product, *options: object, prompt: str = PROMPT) -> str:
    return product.run("generate", "--prompt", prompt, "--max-new-tokens", NEW, *options).ok().out


def test_greedy_text_is_that_of_transformers(product: Product, trained: Trained) -> None:
    text = generated(product, "--load", trained.folder, "--temperature", 0)
    assert (
        text
        == generated(product, "--init-from-hf", trained.hf, "--temperature", 0)
        == generated(product, "--load", trained.hf, "--temperature", 0)
    )
    tokenizer, model = (AutoTokenizer.from_pretrained(trained.hf), AutoModelForCausalLM.from_pretrained(trained.hf))
    prompt = tokenizer(PROMPT, return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0]
    assert text == tokenizer.decode(theirs, skip_special_tokens=True) + "\n"
    assert text.startswith(PROMPT) and len(text) > len(PROMPT) + NEW / 2


def test_sampled_text_depends_on_the_seed_alone(product: Product, trained: Trained) -> None:
    texts = [generated(product, "--load", trained.folder, "--seed", seed, "--temperature", 1) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_many_prompts_from_a_file_side_by_side(product: Product, trained: Trained, tmp_path: Path) -> None:
    """Whatever is in a batch: every prompt has the text it has alone, and the order of the file stays."""
    prompts = ["An object", "The statement is", "Some", "If the value of a name is", "class"]
    (tmp_path / "prompts").write_text("".join(f"{prompt}\n" for prompt in prompts))
    options = ("--load", trained.folder, "--temperature", 1, "--top-p", 0.9)
    alone = generated(product, *options, prompt=prompts[0])
    from_file = ("generate", *options, "--prompt-file", tmp_path / "prompts", "--max-new-tokens", NEW)
    printed = [product.run(*from_file, "--batch-size", size).ok().out for size in (1, 3)]
    assert printed[0] == printed[1] and printed[0].startswith(f"=== prompt 1 ===\n{alone}\n=== prompt 2 ===\n")
    assert [printed[0].index(prompt) for prompt in prompts] == sorted(printed[0].index(prompt) for prompt in prompts)


def test_wrong_sampling_is_refused_all_at_once(refuse: Refuse) -> None:
    said = refuse(["generate", "--load", "x", "--temperature", -1, "--top-p", 0, "--top-k", -1, "--batch-size", 0, "--stop", ""], code=2)
    assert [f"--{name}: got" in said for name in ("temperature", "top-p", "top-k", "batch-size", "stop")] == [True] * 5
    assert "--max-new-tokens: got 0, expected 1 or more" in refuse(["generate", "--load", "x", "--max-new-tokens", 0], code=2)


def test_export_says_what_it_wrote(product: Product, trained: Trained) -> None:
    assert trained.exported.out == f"exported {trained.folder}/iter_0000020 to {trained.hf} (float32)\n"
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    assert {path.name for path in trained.hf.iterdir()} == files | {"SHA256SUMS"}


@pytest.mark.tries("bf16")
@pytest.mark.long
def test_bf16(product: Product, tmp_path: Path) -> None:
    product.train(TP2, bf16=True, save=tmp_path / "run", train_iters=20, lr_decay_iters=20, lr=1e-2)
    losses = column(tmp_path / "run", "lm_loss")
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 1.0
    exported = product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "hf").ok()
    assert exported.out.endswith("(bfloat16)\n")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118  no mapping
    product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "hf", "--dtype", "float32").ok()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float32
    assert generated(product, "--init-from-hf", tmp_path / "hf", "--bf16", "--temperature", 0).startswith(PROMPT)


@pytest.mark.long
@pytest.mark.tries("fp64")
def test_fp64_is_closer_to_the_truth_than_fp32(product: Product, tmp_path: Path) -> None:
    """Two layouts differ by rounding alone: 1e-6 in fp32, a millionth of that in fp64."""
    for name, layout in (("one", Layout(1, {})), ("tp2", TP2)):
        product.train(layout, fp64=True, save=tmp_path / name, train_iters=4)
    for ours, theirs in zip(column(tmp_path / "one", "lm_loss"), column(tmp_path / "tp2", "lm_loss"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.long
@pytest.mark.tries("freeze")
@pytest.mark.parametrize("bf16", [pytest.param(None, marks=pytest.mark.long), True], ids=["fp32", "bf16"])
def test_frozen_weights_stay_and_the_others_learn(product: Product, tmp_path: Path, bf16: bool | None) -> None:
    """Sharded, saved, resumed, and resumed under another layout."""
    names = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.mlp.down_proj.weight")
    options = {"freeze": names, "lr_decay_style": "constant", "bf16": bf16}
    product.train(DP2_PARAMS, save=tmp_path / "run", train_iters=1, **options)
    product.train(DP2_PARAMS, save=tmp_path / "run", load=tmp_path / "run", train_iters=2, **options)
    product.train(TP2, save=tmp_path / "run", load=tmp_path / "run", train_iters=3, **options)
    one, two, three = (state(tmp_path / "run" / f"iter_000000{step}") for step in (1, 2, 3))
    weights = [name for name in one if not name.startswith("optimizer.")]
    frozen = [name for name in weights if any(fnmatchcase(name, pattern) for pattern in names)]
    assert len(frozen) == 11 and len(weights) == 39
    assert {name for name in one if name.startswith("optimizer.exp_avg.")} == {
        f"optimizer.exp_avg.{name}" for name in weights if name not in frozen
    }
    for name in weights:
        assert torch.equal(one[name], two[name]) is torch.equal(two[name], three[name]) is (name in frozen), name
    losses = column(tmp_path / "run", "lm_loss")
    assert len(losses) == 3 and losses[2] < losses[0]


def test_thawing_is_refused_by_name(product: Product, tmp_path: Path) -> None:
    """Nothing knows the moments of a weight that was never trained."""
    product.train(save=tmp_path / "run", train_iters=1, freeze=("model.embed_tokens.*",))
    ended = product.start(save=tmp_path / "run", load=tmp_path / "run", train_iters=2).wait()
    assert ended.codes == (1,) and "optimizer.exp_avg.model.embed_tokens.weight" in ended.err, ended.err
