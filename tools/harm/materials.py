"""Small, whole files of every format that the program reads, made once by the program itself.

``Workshop.make(name)`` returns the folders of one kind: the first is harmed, the others are its
siblings, from which files may be exchanged with it. What is made stays on the disk, so that a case
can be done again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.data.tokenizer.layouts import LAYOUTS, TEKKEN_SPLIT
from tools.harm.sandbox import GIB, Limits, run_forked, valueless, warm

MODEL = (
    *("--hidden-size", "32", "--intermediate-size", "64", "--num-layers", "2"),
    *("--num-attention-heads", "4", "--num-query-groups", "2"),
)
STEPS = (
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "3e-3", "--lr-decay-iters", "9", "--log-interval", "1"),
)
TINY = (*MODEL, *STEPS)
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "a checkpoint is whole or absent",
    "ranks wait for each other at the end of a step",
    "numbers such as {n} and {m} are text, too",
)
SAVED = 2
"""The iteration of the checkpoint that is harmed."""
PATIENT = Limits(120.0, 8 * GIB)
MARK = ".whole"


class Workshop:
    """A folder of materials."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, name: str) -> list[Path]:
        """Return the folders of a material, and make them first if they are not there."""
        folder = self.root / name.replace("/", "-")
        if not (folder / MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            MATERIALS[name](self, folder)
            (folder / MARK).touch()
        return sorted(path for path in folder.iterdir() if path.name.isdecimal())

    def run(self, folder: Path, *words: object) -> None:
        """Run a command in a child, which has to succeed."""
        outcome = run_forked(valueless(*words), folder, PATIENT)
        (folder / "said.txt").unlink(missing_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
        if outcome.end != "done":
            line = " ".join(map(str, words))
            raise RuntimeError(f"{line}: {outcome.end}\n{outcome.words}")
        warm(outcome)


def texts(count: int, start: int = 0) -> list[str]:
    """Documents, all of them different."""
    return [
        " ".join(sentence.format(n=i, m=i * i) for sentence in SENTENCES[i % 3 :]) + f" {i}."
        for i in range(start, start + count)
    ]


def _dataset(shop: Workshop, folder: Path) -> None:
    """An indexed dataset; its siblings are of other documents, with other lengths or the same."""
    for number, start in enumerate((0, 500, 37)):
        source = folder / f"{number}.jsonl"
        lines = [json.dumps({"text": text}) for text in texts(40, start)]
        source.write_text("\n".join(lines) + "\n")
        (folder / str(number)).mkdir()
        tokenizer = ("--tokenizer-model", folder / "0" / "d-tokenizer")
        trained = ("--train-tokenizer", "--vocab-size", 300) if number == 0 else tokenizer
        prefix = folder / str(number) / "d"
        words = ("--input", source, "--output-prefix", prefix, "--append-eod", "--workers", 1)
        shop.run(folder, "preprocess", *words, *trained)
    shutil.move(folder / "0" / "d-tokenizer", folder / "tokenizer")


def data_of(shop: Workshop) -> tuple[str, ...]:
    """The options that name a dataset and its tokenizer."""
    made = shop.make("dataset")[0]
    tokenizer = made.parent / "tokenizer"
    return (
        "--data-path",
        str(made / "d"),
        "--split",
        "90,10,0",
        "--tokenizer-model",
        str(tokenizer),
    )


def _native(shop: Workshop, folder: Path) -> None:
    """A run's folder with one checkpoint. Siblings: a later iteration of the same run, the same
    iteration of a run with another seed and of one with another learning rate. The sibling's files
    lie where those of the harmed one are."""
    runs = ((), (), ("--seed", "7"), ("--lr", "1e-3"))
    for number, more in enumerate(runs):
        save = folder / str(number)
        iterations = SAVED + (number == 1)
        words = (*TINY, *data_of(shop), *more, "--train-iters", iterations, "--save", save)
        shop.run(folder, "pretrain", *words)
        for name in ("log.jsonl", "events.jsonl", "timeline.jsonl"):
            (save / name).unlink(missing_ok=True)
        written = save / f"iter_{iterations:07d}"
        written.rename(save / f"iter_{SAVED:07d}")


def _native_pair(shop: Workshop, folder: Path) -> None:
    """A run's folder with two checkpoints, as ``--load auto`` finds it."""
    for number, more in enumerate(((), ("--seed", "7"))):
        save = folder / str(number)
        words = (*TINY, *data_of(shop), *more, "--train-iters", SAVED, "--save", save)
        shop.run(folder, "pretrain", *words, "--save-interval", 1)
        for name in ("log.jsonl", "events.jsonl", "timeline.jsonl"):
            (save / name).unlink(missing_ok=True)


def _readable_runs(shop: Workshop) -> list[Path]:
    """The runs that others can be made of: not the later iteration, which has a name that the
    program refuses."""
    first, _, *others = shop.make("native")
    return [first, *others]


def _export(shop: Workshop, folder: Path) -> None:
    """HuggingFace folders that the program has exported, with their sums, in several files."""
    for number, run in enumerate(_readable_runs(shop)):
        hf = folder / f"hf-{number}"
        shop.run(folder, "export", "--load", run, "--output", hf)
        words = ("--to", "hf", "--max-shard-bytes", 60_000)
        shop.run(folder, "convert", hf, folder / str(number), *words)
        shutil.rmtree(hf)


def _hf(shop: Workshop, folder: Path) -> None:
    """The same folders as others publish them: without sums."""
    for exported in shop.make("export"):
        shutil.copytree(exported, folder / exported.name)
        (folder / exported.name / "SHA256SUMS").unlink(missing_ok=True)


LISTS_OF_SUMS = ("SHA256SUMS", "integrity.json")


def _foreign(kind: str, *options: str, sums: bool = False) -> Callable[[Workshop, Path], None]:
    def make(shop: Workshop, folder: Path) -> None:
        """The checkpoints in a format of others, with the optimizer's state where it has one.
        Without the lists of sums that this project adds, unless with ``sums``."""
        for number, run in enumerate(_readable_runs(shop)):
            output = folder / str(number)
            shop.run(folder, "convert", run, output, "--to", kind, *options)
            if not sums:
                for name in LISTS_OF_SUMS:
                    for path in output.rglob(name):
                        path.unlink()

    return make


def _base(shop: Workshop, folder: Path) -> None:
    """A model to which adapters are added."""
    shutil.copytree(shop.make("hf")[0], folder / "0")


def _peft(shop: Workshop, folder: Path) -> None:
    """Adapters of PEFT of three runs. Without a list of sums, which PEFT does not write."""
    base = shop.make("base")[0]
    lora = ("--lora-rank", 2, "--lora-alpha", 4, "--init-from-hf", base)
    for number, more in enumerate(((), ("--seed", 7), ("--lora-alpha", 8))):
        save = folder / f"run-{number}"
        words = (*STEPS, *data_of(shop), *lora, *more, "--train-iters", 2, "--save", save)
        shop.run(folder, "pretrain", *words)
        output = folder / str(number)
        shop.run(folder, "export", "--load", save, "--output", output, "--adapter")
        (output / "SHA256SUMS").unlink()


def lora_words(shop: Workshop) -> tuple[object, ...]:
    """The options of a run that trains an adapter."""
    lora = ("--lora-rank", 2, "--lora-alpha", 4, "--init-from-hf", shop.make("base")[0])
    return (*STEPS, *data_of(shop)[:4], *lora)


def _lora(shop: Workshop, folder: Path) -> None:
    """The folder of a run that trains an adapter; its sibling has another seed."""
    for number, more in enumerate(((), ("--seed", 7))):
        save = folder / str(number)
        words = (*lora_words(shop), *more, "--train-iters", SAVED, "--save", save)
        shop.run(folder, "pretrain", *words)
        for name in ("log.jsonl", "events.jsonl"):
            (save / name).unlink(missing_ok=True)


def _timeline(shop: Workshop, folder: Path) -> None:
    """What two runs have recorded of their steps."""
    for number, more in enumerate(((), ("--micro-batch-size", 1))):
        (folder / str(number)).mkdir()
        save = folder / f"run-{number}"
        words = (*TINY, *data_of(shop), *more, "--train-iters", 4, "--save", save)
        steps = ("--profile-step-start", 2, "--profile-step-end", 4)
        file = folder / str(number) / "timeline.json.gz"
        shop.run(folder, "pretrain", *words, *steps, "--record-timeline", file)


def _tokenizer(name: str) -> Callable[[Workshop, Path], None]:
    def make(_: Workshop, folder: Path) -> None:
        """A tokenizer as third parties ship it, and another of its kind."""
        for number, layout in enumerate((name, *SIBLINGS.get(name, ()))):
            (folder / str(number)).mkdir()
            LAYOUTS[layout](folder / str(number))

    return make


def _ranks(_: Workshop, folder: Path) -> None:
    """Ranks of tiktoken alone, as Meta ships LLaMA 3."""
    (folder / "0").mkdir()
    whole = folder / "whole"
    whole.mkdir()
    LAYOUTS["llama3"](whole)
    for name in ("tokenizer.model", "params.json"):
        shutil.copy(whole / "original" / name, folder / "0")


def _tekken(shop: Workshop, folder: Path) -> None:
    """Mistral's tekken.json, with the tokens of the ranks."""
    ranks = shop.make("tokenizer/ranks")[0] / "tokenizer.model"
    tokens = [line.split()[0] for line in ranks.read_text().splitlines()]
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    content = {
        "config": {
            "pattern": TEKKEN_SPLIT,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + 10,
            "default_num_special_tokens": 10,
            "version": "v13",
        },
        "vocab": [
            {"rank": rank, "token_bytes": token, "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    (folder / "0").mkdir()
    (folder / "0" / "tekken.json").write_text(json.dumps(content))


SIBLINGS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"llama2": ("gemma",), "qwen": ("smollm2",), "smollm2": ("qwen",), "mistral": ("llama2",)}
)


def records(count: int, start: int = 0) -> list[dict[str, object]]:
    """Conversations."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {text}"},
                {"role": "assistant", "content": text},
            ]
        }
        for text in texts(count, start)
    ]


def pairs(count: int, start: int = 0) -> list[dict[str, object]]:
    """Preferences."""
    return [
        {"prompt": f"say {text}", "chosen": text, "rejected": text[::-1]}
        for text in texts(count, start)
    ]


def _records(
    ending: str, drawn: Callable[[int, int], list[dict[str, object]]] = records
) -> Callable[[Workshop, Path], None]:
    def make(_: Workshop, folder: Path) -> None:
        """A file of conversations or pairs, and another."""
        for number in range(2):
            (folder / str(number)).mkdir()
            write_records(folder / str(number) / f"data{ending}", drawn(24, 100 * number))

    return make


def write_records(path: Path, content: Sequence[Mapping[str, object]]) -> None:
    """Write records in the format that the file's ending names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in content))
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([dict(record) for record in content])
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


CHAT = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"


def chat_template(shop: Workshop) -> Path:
    """A file with a template."""
    path = shop.root / "chat.jinja"
    path.write_text(CHAT)
    return path


def sft_words(shop: Workshop) -> tuple[object, ...]:
    """The options of a tuning run, but for its data."""
    base = shop.make("base")[0]
    steps = ("--seq-length", 256, *STEPS[2:])
    template = ("--chat-template", chat_template(shop), "--loss-on", "all")
    return (*steps, "--init-from-hf", base, *template)


def _token_store(shop: Workshop, folder: Path) -> None:
    """The tokens that a tuning run has kept."""
    for number in range(2):
        data = folder / f"data-{number}.jsonl"
        write_records(data, records(24, 100 * number))
        words = ("--train-data", data, "--data-cache-path", folder / str(number))
        shop.run(folder, "sft", *sft_words(shop), *words, "--train-iters", 1)


def _scores(shop: Workshop, folder: Path) -> None:
    """The reference's scores of pairs."""
    for number in range(2):
        data = folder / f"data-{number}.jsonl"
        write_records(data, pairs(24, 100 * number))
        (folder / str(number)).mkdir()
        shop.run(folder, *align_words(shop, data, folder / str(number) / "scores"))


def align_words(
    shop: Workshop, data: Path, scores: object = None, iterations: int = 2
) -> tuple[object, ...]:
    """The command that tunes on pairs, with the scores of a file if it is named."""
    template = ("--chat-template", chat_template(shop))
    steps = ("--seq-length", 256, *STEPS[2:], "--init-from-hf", shop.make("base")[0])
    kept = () if scores is None else ("--reference-scores", scores)
    words = ("--train-data", data, *kept, "--train-iters", iterations)
    return ("align", *steps, *template, *words)


def _run_logs(shop: Workshop, folder: Path) -> None:
    """What runs leave for ``report``."""
    for number, more in enumerate(((), ("--seed", 7))):
        save = folder / f"run-{number}"
        words = (*TINY, *data_of(shop), *more, "--train-iters", 5, "--save", save)
        shop.run(folder, "pretrain", *words)
        (folder / str(number)).mkdir()
        for path in save.glob("*.jsonl"):
            shutil.copy(path, folder / str(number))


def _trainer_logs(shop: Workshop, folder: Path) -> None:
    """Logs of other trainers, as ``prove --steps-from`` reads them."""
    from tests.prove.test_logs import megatron, titan

    shop.make("run-logs")
    for number in range(2):
        (folder / str(number)).mkdir()
        losses = [f"{5.0 - i / 7 - number:.6E}" for i in range(1, 9)]
        lines = [megatron(i, loss) for i, loss in enumerate(losses, 1)]
        (folder / str(number) / "megatron.log").write_text("\n".join([*lines, ""]))
        lines = [titan(i, loss) for i, loss in enumerate(losses, 1)]
        (folder / str(number) / "titan.log").write_text("\n".join([*lines, ""]))


def _calibration(_: Workshop, folder: Path) -> None:
    """Measured speeds, as ``plan calibrate`` writes them."""
    from dataclasses import replace

    from megatron_llama.planner.calibration import HOST, as_json
    from megatron_llama.planner.hardware import CPU

    for number in range(2):
        (folder / str(number)).mkdir()
        gpu = replace(CPU, name="desk", peak=CPU.peak / (50 + number), source="a desk")
        content = json.dumps(as_json(replace(HOST, gpu=gpu)), indent=2)
        (folder / str(number) / "desk.json").write_text(content)


def _options_file(shop: Workshop, folder: Path) -> None:
    """Options of a run in YAML."""
    import yaml

    words = [str(word) for word in (*TINY, "--train-iters", 4)]
    options: dict[str, object] = {
        name.removeprefix("--").replace("-", "_"): yaml.safe_load(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    options["lr"] = 3e-3
    for number in range(2):
        (folder / str(number)).mkdir()
        content = yaml.safe_dump({**options, "seed": 11 + number}, sort_keys=False)
        (folder / str(number) / "run.yaml").write_text(content)


MATERIALS: Mapping[str, Callable[[Workshop, Path], None]] = MappingProxyType(
    {
        "dataset": _dataset,
        "native": _native,
        "native-pair": _native_pair,
        "export": _export,
        "hf": _hf,
        "torch_dist": _foreign("torch_dist"),
        "torch_dist/sums": _foreign("torch_dist", sums=True),
        "megatron": _foreign("megatron", "--tensor-model-parallel-size", "2"),
        "megatron-llama": _foreign("megatron-llama", "--pipeline-model-parallel-size", "2"),
        "meta": _foreign("meta"),
        "base": _base,
        "lora": _lora,
        "peft": _peft,
        **{f"tokenizer/{name}": _tokenizer(name) for name in LAYOUTS},
        "tokenizer/ranks": _ranks,
        "tokenizer/tekken-json": _tekken,
        "records/jsonl": _records(".jsonl"),
        "records/parquet": _records(".parquet"),
        "records/arrow": _records(".arrow"),
        "token-store": _token_store,
        "records/pairs": _records(".jsonl", pairs),
        "scores": _scores,
        "run-logs": _run_logs,
        "trainer-logs": _trainer_logs,
        "timeline": _timeline,
        "calibration": _calibration,
        "options-file": _options_file,
    }
)
