"""What is read, through which command, and what of its result is compared.

A reader works in a folder in which ``in`` is the possibly harmed copy. It may write into ``out``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.data.tokenizer.layouts import LAYOUTS
from tests.e2e.product import exact_curve, state
from tools.harm.materials import (
    SAVED,
    STEPS,
    TINY,
    Workshop,
    align_words,
    data_of,
    lora_words,
    records,
    sft_words,
    texts,
    write_records,
)
from tools.harm.sandbox import command

Values = dict[str, str]
CARRIED = "carried "
"""Begins the names of values with which nobody computes."""
READ = Path("in")
WRITTEN = Path("out")


@dataclass(frozen=True)
class Format:
    """Something that the program reads."""

    name: str
    material: str
    read: Callable[[Workshop], Values]
    """Reads ``in`` of the working folder through a command, and returns the result."""
    sealed: bool
    """It has checksums, so that no other result may come out of a damaged one."""
    drawn_as: str = ""
    """The name from which its damage is drawn, so that several readers get the same; its own if
    empty."""


def digest(content: bytes) -> str:
    """A short name of a content."""
    return hashlib.sha256(content).hexdigest()[:16]


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a JSON value with their paths."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value)


NOT_COMPUTED = ("torch_version", "hf_config.", "validation_loss", "config.checkpoint.")
"""Beginnings of the fields of ``meta.json`` with which no later step computes."""


def tensor_values(checkpoint: Path) -> Values:
    """Every tensor of a native checkpoint."""
    return {name: digest(tensor.numpy().tobytes()) for name, tensor in state(checkpoint).items()}


def saved_values(run: Path) -> Values:
    """Everything of a run's newest checkpoint, and its curve."""
    newest = max(run.glob("iter_" + 7 * "[0-9]"), default=None)
    if newest is None:  # it took itself for done
        return {"saved": "nothing"}
    values = {f"tensor {name}": text for name, text in tensor_values(newest).items()}
    for name, value in flattened(json.loads((newest / "meta.json").read_text())):
        values[f"{CARRIED * name.startswith(NOT_COMPUTED)}meta {name}"] = value
    values["curve"] = str(exact_curve(run))
    return values


def file_values(folder: Path, carried: tuple[str, ...] = ()) -> Values:
    """Every file of a folder; JSON by its fields."""
    values: Values = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name in ("SHA256SUMS", "events.jsonl"):  # sums of what is compared; times
            continue
        content = path.read_bytes()
        fields = None
        if path.suffix == ".json" and path.name != "tokenizer.json":
            with suppress(ValueError, RecursionError):  # harm that was copied as it is
                fields = dict(flattened(json.loads(content)))
        if fields is None:
            values[name] = digest(content)
            continue
        for field, text in fields.items():
            values[f"{CARRIED * field.startswith(carried)}{name} {field}"] = text
    return values


HF_CARRIED = ("transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype")


def resume(shop: Workshop) -> Values:
    """Go on with a run for one step."""
    where = ("--load", READ, "--save", WRITTEN, "--train-iters", SAVED + 1)
    command("pretrain", *TINY, *data_of(shop), *where)
    return saved_values(WRITTEN)


def resume_automatically(shop: Workshop) -> Values:
    """Go on with the newest good checkpoint of the run's own folder."""
    where = ("--load", "auto", "--save", READ, "--train-iters", SAVED + 1)
    command("pretrain", *TINY, *data_of(shop), *where)
    return saved_values(READ)


def export(_: Workshop) -> Values:
    """Export a checkpoint to HuggingFace's format."""
    command("export", "--load", READ, "--output", WRITTEN)
    return file_values(WRITTEN, HF_CARRIED)


def begin_from_hf(shop: Workshop) -> Values:
    """Begin a run with a model of HuggingFace's format."""
    where = ("--init-from-hf", READ, "--save", WRITTEN, "--train-iters", 1)
    words = data_of(shop)
    command("pretrain", *STEPS, *words[: words.index("--tokenizer-model")], *where)
    return {**saved_values(WRITTEN), **file_values(WRITTEN / "tokenizer")}


def convert(to: str, _: Workshop) -> Values:
    """Write a model in another format."""
    command("convert", READ, WRITTEN, "--to", to)
    if to == "native":
        newest = max(WRITTEN.glob("iter_" + 7 * "[0-9]"))
        tensors = tensor_values(newest)
        return tensors | dict(flattened(json.loads((newest / "meta.json").read_text())))
    return file_values(WRITTEN, HF_CARRIED)


def generate(_: Workshop) -> Values:
    """Continue a prompt."""
    words = ("--load", READ, "--prompt", "the quick", "--max-new-tokens", 12, "--temperature", 0)
    command("generate", *words)
    return {"text": Path("said.txt").read_text()}


def train_on_dataset(shop: Workshop) -> Values:
    """Train on all samples of a dataset once."""
    words = (
        "--data-path",
        READ / "d",
        "--split",
        "100,0,0",
        "--train-iters",
        40,
        "--save",
        WRITTEN,
    )
    tokenizer = ("--tokenizer-model", shop.make("dataset")[0].parent / "tokenizer")
    command("pretrain", *TINY, *tokenizer, *words)
    return {"curve": str(exact_curve(WRITTEN))}


def inspect_dataset(_: Workshop) -> Values:
    """Verify a dataset, and read all its documents."""
    from megatron_llama.config.schema import DataConfig
    from megatron_llama.data.datasets import open_dataset

    command("inspect", "dataset", READ / "d", "--verify")
    dataset = open_dataset(str(READ / "d"), DataConfig())
    tokens = dataset.tokens(0, dataset.num_tokens)
    return {"tokens": digest(tokens.tobytes()), "lengths": digest(dataset.lengths.tobytes())}


def merge(shop: Workshop) -> Values:
    """Add an adapter to its model."""
    command("merge", shop.make("base")[0], WRITTEN, "--adapter", READ)
    return file_values(WRITTEN, HF_CARRIED)


def tokenize(_: Workshop) -> Values:
    """Make a dataset with a tokenizer."""
    lines = [json.dumps({"text": text}) for text in (*texts(60), *ODD_TEXTS)]
    Path("text.jsonl").write_text("\n".join(lines) + "\n")
    words = ("--input", "text.jsonl", "--output-prefix", WRITTEN, "--workers", 1, "--append-eod")
    command("preprocess", *words, "--tokenizer-model", READ)
    return {"tokens": digest(Path("out.bin").read_bytes() + Path("out.idx").read_bytes())}


ODD_TEXTS = (
    "D\u00fcrfen wir? Ja: 1234567 \u20ac, na\u00efve caf\u00e9, \u4f60\u597d, \U0001f600",
    "def f(x):\n\treturn x ** 2  # don't\n\n\n",
    "  leading, trailing  ",
)


def render(_: Workshop) -> Values:
    """Show a conversation with the template of a tokenizer."""
    write_records(Path("data.jsonl"), records(4))
    words = ("preview", "data.jsonl", "--tokenizer-model", READ, "--loss-on", "all")
    command("data", *words)
    return {"said": Path("said.txt").read_text()}


def tune(shop: Workshop) -> Values:
    """Tune on all conversations of a file."""
    data = next(READ.glob("*"), READ / "missing.jsonl")
    words = ("--train-data", data, "--train-iters", 6, "--data-cache-path", "cache")
    command("sft", *sft_words(shop), *words, "--save", WRITTEN)
    return {"curve": str(exact_curve(WRITTEN))}


def tune_with_store(shop: Workshop) -> Values:
    """Tune on conversations whose tokens are kept."""
    data = shop.make("token-store")[0].parent / "data-0.jsonl"
    words = ("--train-data", data, "--train-iters", 6, "--data-cache-path", READ)
    command("sft", *sft_words(shop), *words, "--save", WRITTEN)
    return {"curve": str(exact_curve(WRITTEN))}


def align(shop: Workshop) -> Values:
    """Tune on pairs with the reference's scores."""
    data = shop.make("scores")[0].parent / "data-0.jsonl"
    command(*align_words(shop, data, READ / "scores"), "--save", WRITTEN)
    return {"curve": str(exact_curve(WRITTEN))}


def align_from_records(shop: Workshop) -> Values:
    """Tune on all pairs of a file."""
    data = next(READ.glob("*"), READ / "missing.jsonl")
    command(*align_words(shop, data, iterations=6), "--data-cache-path", "cache", "--save", WRITTEN)
    return {"curve": str(exact_curve(WRITTEN))}


def resume_adapter(shop: Workshop) -> Values:
    """Go on with a run that trains an adapter."""
    where = ("--load", READ, "--save", WRITTEN, "--train-iters", SAVED + 1)
    command("pretrain", *lora_words(shop), *where)
    return saved_values(WRITTEN)


def compare_timeline(_: Workshop) -> Values:
    """Hold a recorded timeline against its plan."""
    command("plan", "compare", READ / "timeline.json.gz", "--json", "compared.json")
    return dict(flattened(json.loads(Path("compared.json").read_text())))


def report(_: Workshop) -> Values:
    """Report on a run."""
    command("report", READ, "--json", "report.json", "--html", "report.html")
    return dict(flattened(json.loads(Path("report.json").read_text())))


def read_trainer_logs(_: Workshop) -> Values:
    """Read the losses of other trainers."""
    from megatron_llama.prove.logs import read_log

    logs = [read_log(path) for path in sorted(READ.iterdir())]
    names = sorted(path.name for path in READ.iterdir())
    return {
        f"{name} {i} {column}": repr(getattr(step, column))
        for name, log in zip(names, logs, strict=True)
        for i, step in log.steps.items()
        for column in ("loss", "grad_norm")
    }


def plan(_: Workshop) -> Values:
    """Plan with measured speeds."""
    model = ("--hidden-size", 64, "--intermediate-size", 128, "--num-layers", 2)
    more = ("--num-attention-heads", 4, "--vocab-size", 512, "--seq-length", 64)
    words = ("--gpus", 2, "--global-batch-size", 8, "--json", "plan.json", "--seconds", 5)
    command("plan", *model, *more, *words, "--coefficients", READ / "desk.json")
    return dict(flattened(json.loads(Path("plan.json").read_text())))


def read_options(shop: Workshop) -> Values:
    """Look at a run with the options of a file."""
    command("pretrain", "--config", READ / "run.yaml", *data_of(shop), "--dry-run")
    return {"said": Path("said.txt").read_text()}


CHATTING = ("llama2", "mistral", "llama3", "gemma", "qwen", "smollm2")
"""Tokenizers with a chat template."""
ENDING = (*(name for name in LAYOUTS if name != "wordpiece"), "ranks", "tekken-json")
"""Tokenizers with an end token, as the datasets of runs need it."""
KINDS = ("jsonl", "parquet", "arrow")
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        format.name: format
        for format in (
            Format("native", "native", resume, True),
            Format("native/auto", "native-pair", resume_automatically, True),
            Format("native/export", "native", export, True),
            Format("export", "export", begin_from_hf, True),
            Format("export/convert", "export", partial(convert, "hf"), True),
            Format("lora", "lora", resume_adapter, True),
            Format("hf", "hf", begin_from_hf, False),
            Format("hf/convert", "hf", partial(convert, "hf"), False),
            Format("hf/generate", "hf", generate, False),
            Format("dataset", "dataset", inspect_dataset, True),
            Format("dataset/train", "dataset", train_on_dataset, True),
            Format("torch_dist", "torch_dist", partial(convert, "native"), False),
            Format("torch_dist/sums", "torch_dist/sums", partial(convert, "native"), True),
            Format("megatron", "megatron", partial(convert, "hf"), False),
            Format("megatron-llama", "megatron-llama", partial(convert, "hf"), False),
            Format("meta", "meta", partial(convert, "hf"), False),
            Format("peft", "peft", merge, False),
            *(Format(f"tokenizer/{name}", f"tokenizer/{name}", tokenize, False) for name in ENDING),
            *(Format(f"chat/{name}", f"tokenizer/{name}", render, False) for name in CHATTING),
            *(Format(f"records/{kind}", f"records/{kind}", tune, False) for kind in KINDS),
            Format("records/pairs", "records/pairs", align_from_records, False),
            Format("token-store", "token-store", tune_with_store, True),
            Format("scores", "scores", align, True),
            Format("report", "run-logs", report, False),
            Format("trainer-logs", "trainer-logs", read_trainer_logs, False),
            Format("timeline", "timeline", compare_timeline, False),
            Format("calibration", "calibration", plan, False),
            Format("options-file", "options-file", read_options, False),
        )
    }
)
