"""Instruction tuning as its users run it: every option, every layout, and a plain loop in transformers on the same batches."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.config.parse import options_of
from megatron_llama.config.schema import Config
from megatron_llama.data.corpus import docstring_pairs
from megatron_llama.data.loader import BatchLoader
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import ExampleSamples, read_examples
from megatron_llama.tune.sft.sft_config import DataToolConfig, SFTConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import torch_twin
from tests.checkpoint.cases import renew_sums
from tests.e2e.product import CP2_RING, DP2, DP2_PARAMS, MIXED, ONE, Layout, Product, assert_same_curve, column, exact_curve, log, words
from tests.launcher import Finished

SEQ_LENGTH, GLOBAL, ITERS = 160, 4, 4
TUNING = {
    "seq_length": SEQ_LENGTH, "micro_batch_size": 2, "global_batch_size": GLOBAL, "train_iters": ITERS, "lr": 3e-3, "log_interval": 1,
    "split": "90,10,0", "on_bad_sample": "drop", "packing": True,
}
Tune = Callable[..., Finished]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signatures and their documentation, in OpenAI's format."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    found = islice(((q, a) for q, a in docstring_pairs() if len(q) < 50 and len(a) < 70), 120)
    roles = ("user", "assistant")
    lines = [json.dumps({"messages": [{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)]}) for pair in found]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def tune(product: Product, base: Path, pairs: Path) -> Tune:
    """Run ``sft`` to its end; what it is to be unless told otherwise is in TUNING."""

    def run(layout: Layout = ONE, **changes: object) -> Finished:
        options = {"init_from_hf": base, "train_data": pairs, **TUNING, **layout.options, **changes}
        return product.launcher.start(["sft", *words(options)], layout.processes).wait()

    return run


@pytest.fixture(scope="module")
def straight(tune: Tune, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    tune(save=folder, neftune_noise_alpha=5, eval_interval=2, eval_iters=2).ok()
    return folder


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param(DP2_PARAMS, id="dp2 params"), pytest.param(MIXED, id="everything")])
def test_every_layout_tunes_the_same_model(layout: Layout, tune: Tune, straight: Path, tmp_path: Path) -> None:
    """Packed samples, with noise."""
    micro = 1 if layout is DP2_PARAMS else 2
    tune(layout, save=tmp_path, neftune_noise_alpha=5, eval_interval=2, eval_iters=2, micro_batch_size=micro).ok()
    assert_same_curve(tmp_path, straight)


@pytest.mark.long
def test_resuming_changes_no_bit(tune: Tune, straight: Path, tmp_path: Path) -> None:
    options = {"neftune_noise_alpha": 5, "eval_interval": 2, "eval_iters": 2, "save": tmp_path, "lr_decay_iters": ITERS}
    tune(train_iters=2, **options).ok()
    tune(load=tmp_path, init_from_hf=None, **options).ok()
    assert exact_curve(tmp_path) == exact_curve(straight)


@pytest.mark.long
def test_a_plain_loop_in_transformers(tune: Tune, base: Path, pairs: Path, tmp_path: Path) -> None:
    """The same losses from transformers' model and torch's AdamW on the same batches, with ordinary attention masks."""
    tune(save=tmp_path, clip_grad=0, weight_decay=0, lr_decay_style="constant").ok()
    tokenizer = ChatTokenizer(load_tokenizer(base))
    examples = read_examples([pairs], tokenizer, SFTConfig(), SEQ_LENGTH)
    samples = ExampleSamples(examples, range(round(0.9 * len(examples))), SEQ_LENGTH, packing=True)
    loader = BatchLoader(samples, shuffled=True, micro_batch_size=GLOBAL, global_batch_size=GLOBAL, seed=Config().training.seed)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")

    def losses_of(step: int) -> Iterator[torch.Tensor]:
        [batch] = loader.microbatches(step * GLOBAL)
        assert batch.document_mask is not None and batch.position_ids is not None and batch.loss_mask is not None
        attend = torch.where(batch.document_mask, 0.0, torch.finfo(torch.float32).min)
        logits = model(input_ids=batch.tokens.t(), attention_mask=attend, position_ids=batch.position_ids.t()).logits
        every = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.t().flatten(), reduction="none")
        yield every[batch.loss_mask.t().flatten().bool()].mean()

    losses, _ = torch_twin.train(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0), losses_of, ITERS, clip=0)
    assert column(tmp_path, "lm_loss") == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0] - 0.3


def test_what_a_run_says_and_leaves(tune: Tune, base: Path, pairs: Path, tmp_path: Path) -> None:
    ended = tune(save=tmp_path / "run", export_hf=tmp_path / "hf", eval_interval=ITERS).ok()
    assert (
        " chat template: built-in template plain, since the tokenizer has none; in the loss: answers, which the template marks\n"
        in ended.out
    )
    assert f" {pairs}: format messages\n 120 examples, " in ended.out
    packed = re.search(r"108 training examples, packed into (\d+) samples, which are 8", ended.out)
    assert (
        packed is not None
        and int(packed[1]) < 70
        and "\n 12 of 120 examples are not trained: 12 for validation (--split 90,10,0)\n" in ended.out
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "def f()"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == ChatTokenizer(load_tokenizer(base)).prompt("def f()")
    assert (tmp_path / "run" / "tokenizer" / "chat_template.jinja").is_file()
    evaluated = [entry["validation_loss"] for entry in log(tmp_path / "run") if "validation_loss" in entry]
    assert evaluated[-1] < evaluated[0] - 0.3


@pytest.fixture(scope="module")
def usual(tune: Tune, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without noise."""
    folder = tmp_path_factory.mktemp("usual")
    tune(save=folder, eval_interval=2, eval_iters=2).ok()
    return folder


CHANGES: dict[str, tuple[dict[str, object], str]] = {
    "loss_on": ({"loss_on": "all"}, "in the loss: every token (--loss-on all)"),
    "packing": ({"packing": None}, "108 training examples, one to each of 108 samples"),
    "chat_template": ({"chat_template": "llama2"}, "chat template: built-in template llama2; in the loss: answers"),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 50}, "120 examples"),
    "seq_length": ({"seq_length": 80, "on_long_sample": "drop"}, " dropped\n"),
    "data_format": ({"data_format": "alpaca", "train_data": "alpaca"}, "format alpaca"),
    "valid_data": ({"split": None, "valid_data": "alpaca"}, "120 training examples, packed into"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CHANGES)
def test_each_option_changes_the_run(name: str, tune: Tune, usual: Path, pairs: Path, tmp_path: Path) -> None:
    """What it prints, and the loss of its first step."""
    changes, words_of_it = CHANGES[name]
    turns = [json.loads(line)["messages"] for line in pairs.read_text().splitlines()]
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": turn[0]["content"], "output": turn[1]["content"]} for turn in turns]))
    files = {key: tmp_path / "alpaca.json" for key, value in changes.items() if value == "alpaca" and key != "data_format"}
    ended = tune(save=tmp_path / "run", train_iters=1, **{**changes, **files}).ok()
    assert words_of_it in ended.out
    if name != "valid_data":
        assert (column(tmp_path / "run", "lm_loss") == column(usual, "lm_loss")[:1]) is (name == "data_format")


def test_noise_is_for_training_alone(usual: Path, straight: Path) -> None:
    quiet, noisy = log(usual), log(straight)
    assert quiet[0]["validation_loss"] == noisy[0]["validation_loss"]
    assert quiet[1]["lm_loss"] != noisy[1]["lm_loss"]


SAMPLED = {"train_iters": 3, "save_interval": 2, "lr": 1e-2, "sample_interval": 2, "sample_tokens": 7}
SAMPLED_PROMPTS = ("The value of", "A list", "def f(self)")


def samples_of(run: Finished) -> list[tuple[str, str, str]]:
    """Iteration, prompt and continuation of what a run printed."""
    return re.findall(r"^ sample at iteration (\d+) \| '(.*)' \| (.*) \|$", run.out, re.MULTILINE)


@pytest.fixture(scope="module")
def samples(product: Product, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """Those of one process, which are what ``generate`` gives with the weights of that moment."""
    folder = tmp_path_factory.mktemp("samples")
    found = samples_of(product.train(save=folder, sample_prompt=SAMPLED_PROMPTS, **SAMPLED).ok())
    assert [(iteration, prompt) for iteration, prompt, _ in found] == [(i, prompt) for i in "23" for prompt in SAMPLED_PROMPTS]
    for iteration in "23":
        greedy = ("--max-new-tokens", SAMPLED["sample_tokens"], "--temperature", 0, "--prompt", *SAMPLED_PROMPTS)
        lines = product.run("generate", "--json", "--load", folder / f"iter_{int(iteration):07d}", *greedy).ok().out.splitlines()
        texts = "".join(line["prompt"] + line["text"] for line in map(json.loads, lines))
        # A continuation alone has lost the space before its first word.
        ours = "".join(prompt + literal_eval(text) for at, prompt, text in found if at == iteration)
        assert "".join(texts.split()) == "".join(ours.split())
    return found


@pytest.mark.long
@pytest.mark.tries("sample_interval", "sample_prompt", "sample_tokens")
@pytest.mark.parametrize("layout", [DP2_PARAMS, MIXED], ids=["dp2 params", "everything"])
def test_samples_are_what_generate_gives(layout: Layout, product: Product, samples: list[tuple[str, str, str]]) -> None:
    """Under every layout, with the weights of that moment."""
    assert samples_of(product.train(layout, sample_prompt=SAMPLED_PROMPTS, **{**SAMPLED, "save_interval": None})) == samples


@pytest.mark.long
@pytest.mark.tries("early_stop_patience")
def test_a_run_that_gets_no_better_ends(tune: Tune, tmp_path: Path) -> None:
    """Two evaluations above the first, the second of them after a resume; what has ended is exported, and the best is kept."""
    options = {"lr": 0.5, "lr_decay_style": "constant", "eval_interval": 1, "early_stop_patience": 3, "train_iters": 9, "save_interval": 1}
    first = tune(save=tmp_path / "run", save_retain=1, exit_interval=2, **options).ok()
    assert " stopped by --exit-interval after iteration 2\n" in first.out
    again = tune(save=tmp_path / "run", save_retain=1, load=tmp_path / "run", init_from_hf=None, export_hf=tmp_path / "hf", **options).ok()
    losses = [entry["validation_loss"] for entry in log(tmp_path / "run") if "validation_loss" in entry]
    assert min(losses) == losses[0] and len(losses) == 4
    said = f" stopped after iteration 3: 3 evaluations without a lower loss than {losses[0]:.6E} of iteration 0 (--early-stop-patience)\n"
    assert said in again.out and (tmp_path / "hf" / "model.safetensors").is_file()
    best = 1 + losses[1:].index(min(losses[1:]))
    assert (tmp_path / "run" / "best").resolve().name == f"iter_{best:07d}"


def learned_tokens(base: Path, file: Path) -> int:
    """Of all examples of a file that fit."""
    examples = read_examples([file], ChatTokenizer(load_tokenizer(base)), SFTConfig(), SEQ_LENGTH)
    return sum(int(mask[1:].sum()) for mask in examples.loss_mask)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "micro", "count"), [(DP2, 2, 115), (CP2_RING, 8, 7)])
def test_every_held_out_token_counts_once(layout: Layout, micro: int, count: int, tune: Tune, base: Path, pairs: Path, tmp_path: Path) -> None:
    """Examples in groups of 4 and 8: the last group is not whole, or the first one is already the last."""
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(pairs.read_text().splitlines(keepends=True)[:count]))
    options = {"split": None, "valid_data": file, "train_iters": 1, "lr": 0, "eval_interval": 1, "eval_iters": 0, "packing": None}
    tune(layout, save=tmp_path / "run", micro_batch_size=micro, global_batch_size=16, **options).ok()
    found = [(entry["validation_tokens"], entry["validation_loss"]) for entry in log(tmp_path / "run") if "validation_loss" in entry]
    loss = expected_loss(base, file)
    assert found == [(learned_tokens(base, file), pytest.approx(loss, rel=1e-6))] * 2


@cache
def _model(base: Path) -> tuple[Any, ChatTokenizer]:
    return AutoModelForCausalLM.from_pretrained(base), ChatTokenizer(load_tokenizer(base))


def expected_loss(base: Path, file: Path) -> float:
    """In transformers, example by example, over the tokens of answers."""
    model, tokenizer = _model(base)
    total, count, examples = 0.0, 0, read_examples([file], tokenizer, SFTConfig(), SEQ_LENGTH)
    for ids, loss_mask in zip(examples.ids, examples.loss_mask, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids[:-1], dtype=torch.int64)[None]).logits[0]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], dtype=torch.int64), reduction="none")
        total, count = (total + float(each[torch.tensor(loss_mask[1:])].double().sum()), count + int(loss_mask[1:].sum()))
    return total / count


@pytest.mark.tries("epochs")
def test_epochs_read_every_sample_so_many_times(tune: Tune, pairs: Path, tmp_path: Path) -> None:
    """Two passes in steps of 16, stopped inside the first and gone on under another layout; then half a pass more."""
    options = {"train_iters": None, "global_batch_size": 16, "split": "100,0,0"}
    straight = tune(epochs=2, save=tmp_path / "straight", **options).ok()
    samples = int(re.search(r"packed into (\d+) samples", straight.out)[1])  # type: ignore[index]
    steps = -(-2 * samples // 16)
    assert samples % 8 and f" --epochs 2: {samples} samples in a pass, {steps} steps in all\n" in straight.out
    assert column(tmp_path / "straight", "global_batch_size") == [16] * (steps - 1) + [2 * samples % 16]
    assert column(tmp_path / "straight", "consumed_samples")[-1] == 2 * samples
    folder = tmp_path / "stopped"
    tune(DP2, epochs=2, save=folder, exit_interval=2, **options).ok()
    again = {**options, "save": folder, "load": folder, "init_from_hf": None}
    tune(epochs=2, **again).ok()
    assert_same_curve(folder, tmp_path / "straight")
    tune(epochs=2.5, **again).ok()
    assert column(folder, "consumed_samples")[-1] == round(2.5 * samples)
    assert column(folder, "global_batch_size")[steps:] == [16] * (round(samples / 2) // 16) + [round(2.5 * samples) % (2 * samples) % 16]


@pytest.mark.long
def test_one_step_of_an_epoch_has_the_loss_of_its_examples(tune: Tune, base: Path, pairs: Path, tmp_path: Path) -> None:
    """More places than examples: what fills them counts for nothing."""
    options = {"train_iters": None, "epochs": 1, "global_batch_size": 128, "split": "100,0,0"}
    tune(DP2, save=tmp_path, packing=None, **options).ok()
    assert column(tmp_path, "global_batch_size") == [120]
    assert column(tmp_path, "lm_loss") == [pytest.approx(expected_loss(base, pairs), rel=1e-6)]


@pytest.mark.long
def test_resuming_with_other_examples(tune: Tune, pairs: Path, tmp_path: Path) -> None:
    """Refused on every rank before anything is trained, unless that is what was asked for; a file that only moved is no other data."""
    lines, moved, longer, other = (
        pairs.read_text().splitlines(keepends=True),
        *(tmp_path / f"{name}.jsonl" for name in ("moved", "longer", "other")),
    )
    moved.write_text("".join(lines))
    longer.write_text("".join([*lines, lines[0]]))
    other.write_text("".join([*lines[1:4], lines[0], *lines[4:]]))
    folder = tmp_path / "run"
    common = {"split": "100,0,0", "train_iters": 3, "save": folder, "packing": None}
    tune(exit_interval=1, **common).ok()
    again = {**common, "load": folder, "init_from_hf": None}
    begin = f"error: --train-data: got other training samples than those of {folder}/iter_0000001 ("
    for changes, says in (
        ({"train_data": longer}, "examples 120, now 121; tokens "),
        ({"train_data": other}, "as many examples and tokens, with other content)"),
        ({"loss_on": "all"}, "learned tokens "),
        ({"packing": True}, "samples 120, now "),
    ):
        refused = tune(DP2 if "packing" in changes else ONE, **{**again, **changes})
        assert set(refused.codes) == {1} and refused.err.count("error: ") == 1
        assert begin in refused.err and says in refused.err and "--on-changed-data continue" in refused.err
    assert column(folder, "iteration") == [1]
    tune(exit_interval=2, train_data=moved, **again).ok()
    went_on = tune(train_data=longer, on_changed_data="continue", **again).ok()
    assert f" warning: other training samples than those of {folder}/iter_0000002 (examples 120, now 121" in went_on.out
    assert column(folder, "iteration") == [1, 2, 3]
    tune(train_data=pairs, finetune=True, **{**again, "save": tmp_path / "new"}).ok()


@pytest.mark.long
def test_a_template_that_says_what_day_it_is(tune: Tune, base: Path, pairs: Path, tmp_path: Path) -> None:
    """A run that goes on later renders the day of its beginning: here the checkpoint is told that this was long ago."""
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + BUILT_IN["plain"])
    options = {"chat_template": template, "save": tmp_path / "run", "train_iters": 2}
    tune(exit_interval=1, **options).ok()
    meta = tmp_path / "run" / "iter_0000001" / "meta.json"
    content = json.loads(meta.read_text())
    assert content["training_data"]["rendered"] == datetime.now().date().isoformat()
    then = ChatTokenizer(load_tokenizer(base), str(template), now=datetime(2001, 2, 3))
    examples = read_examples([pairs], then, SFTConfig(on_bad_sample="drop"), SEQ_LENGTH)
    training = range(round(0.9 * len(examples)))
    identity = ExampleSamples(examples, training, SEQ_LENGTH, packing=True, rendered="2001-02-03").identity()
    assert identity["digest"] != content["training_data"]["digest"]
    meta.write_text(json.dumps(content | {"training_data": identity}))
    renew_sums(meta.parent)
    tune(load=tmp_path / "run", init_from_hf=None, **options).ok()


@pytest.mark.long
def test_bad_and_long_examples(tune: Tune, pairs: Path, tmp_path: Path) -> None:
    """The run stops before training, on every rank with one message, or counts."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[1]\n" + pairs.read_text())
    for options, message in (
        ({"on_bad_sample": "stop"}, f"{bad}:1: got a JSON array"),
        ({"on_long_sample": "stop", "on_bad_sample": None}, " tokens, expected at most 41"),
    ):
        stopped = tune(DP2, train_data=bad, seq_length=40, save=tmp_path / "run", micro_batch_size=1, **options)
        assert set(stopped.codes) == {1} and stopped.err.count("error: ") == 1 and message in stopped.err
    assert column(tmp_path / "run", "lm_loss") == []
    turns = [{"role": role, "content": "text"} for role in ("assistant", "user", "assistant")]
    bad.write_text(bad.read_text() + json.dumps({"messages": turns, "reward": 1.0}) + "\n")
    repairs = ("drop-leading-answers", "merge-repeated-roles")
    dropped = tune(train_data=bad, train_iters=1, repair_conversations=repairs, ignore_keys=("reward", "other")).ok()
    assert f" unusable: 1 examples\n   {bad}:1: got a JSON array" in dropped.out
    assert " repaired conversations: drop-leading-answers 1\n" in dropped.out


@pytest.mark.long
def test_wrong_options(tune: Tune, product: Product) -> None:
    ended = tune(data_path="x", valid_data="y", neftune_noise_alpha=-1, reset_position_ids=True, train_data=None)
    assert ended.codes == (2,)
    flags = (
        "--data-path: got x",
        "--split, --valid-data: got both",
        "--neftune-noise-alpha: got -1",
        "--reset-position-ids",
        "--train-data: got nothing",
    )
    assert [flag in ended.err for flag in flags] == [True] * 5
    planned = tune(dry_run="yes")
    assert "valid for 1 process\n" in planned.out and "--data-path" not in planned.out
    missing = tune(train_data="none.jsonl")
    assert missing.codes == (1,) and "none.jsonl: got no such file" in missing.err


@pytest.mark.long
def test_data_commands(product: Product, base: Path, pairs: Path, tmp_path: Path) -> None:
    common = ("--tokenizer-model", base, "--seq-length", 64)
    shown = product.run("data", "preview", pairs, *common, "--example", 2).ok().out
    question, answer = (message["content"] for message in json.loads(pairs.read_text().splitlines()[1])["messages"])
    assert f"{pairs}:2: format messages, " in shown and f"<|user|>\n{question}\n<|assistant|>\n{answer}</s>" in shown
    marked = shown[shown.index("[[") + 2 : shown.index("]]")]
    assert marked.replace("|", "").replace(" ", "") == f"{answer}</s>".replace(" ", "")
    colored = product.run("data", "preview", pairs, *common, "--color", "always", "--loss-on", "all").ok().out
    assert "\x1b[1;32m<s>|" in colored and "[[" not in colored
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n' * 12 + pairs.read_text())
    checked = product.run("data", "check", tmp_path / "bad.jsonl", *common)
    assert checked.codes == (1,) and checked.err == ""
    assert product.run("data", "check", tmp_path / "bad.jsonl", *common, "--on-bad-sample", "drop").ok().out == checked.out
    for line in range(1, 13):
        assert f"  {tmp_path}/bad.jsonl:{line}: field 'messages': got an empty array" in checked.out
    assert "  by reason: no messages 12" not in checked.out.splitlines()[-1] and "no messages 12" in checked.out
    assert "tokens of an example: least " in checked.out and "too long: " in checked.out
    assert product.run("data", "preview", tmp_path / "bad.jsonl", *common).codes == (1,)
    wrote = product.run("data", "stats", pairs, *common, "--output", tmp_path / "stats.html", "--on-long-sample", "drop").ok()
    page = (tmp_path / "stats.html").read_text()
    assert wrote.out.endswith(f"wrote {tmp_path}/stats.html\n") and page.count("<svg") == 3 and "Tokens in the loss" in page
    wrong = product.run("data", "stats", "--example", 0, "--output", "stats.pdf")
    assert (wrong.codes == (2,) and wrong.err.count("  - ") == 4 and "--output: got stats.pdf, expected a name that ends in .html" in wrong.err)


def test_no_option_is_forgotten() -> None:
    """Each is tried above by name."""
    text = Path(__file__).read_text()
    for name in options_of([SFTConfig, DataToolConfig]).keys() - {"action"}:
        assert f'"{name}"' in text or f" {name}=" in text or f"({name}=" in text or f'"--{name.replace("_", "-")}"' in text, name
