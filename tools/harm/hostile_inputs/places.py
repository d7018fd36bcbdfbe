"""Files that are no files, names that leave their folder, and folders that claim too much."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from tools.harm.hostile_inputs.case import CHECKPOINT, Change, Hostile, replaced, with_json

SECRET = "the content of a file that is no part of the model"
"""Lies beside the folder that is read, and must not come out of it."""
SECRET_FILE = "secret.txt"
FILES = (
    ("native", f"{CHECKPOINT}/meta.json"),
    ("native", f"{CHECKPOINT}/.metadata"),
    ("native", f"{CHECKPOINT}/__0_0.distcp"),
    ("native", f"{CHECKPOINT}/SHA256SUMS"),
    ("native", "latest_checkpointed_iteration.txt"),
    ("hf/convert", "config.json"),
    ("hf/convert", "generation_config.json"),
    ("hf/convert", "tokenizer_config.json"),
    ("hf/convert", "tokenizer.json"),
    ("hf/convert", "chat_template.jinja"),
    ("hf/convert", "additional_chat_templates/a.jinja"),
    ("hf/convert", "special_tokens_map.json"),
    ("hf/convert", "model.safetensors.index.json"),
    ("hf/convert", "model-00001-of-00003.safetensors"),
    ("hf", "tokenizer.model"),
    ("export/convert", "SHA256SUMS"),
    ("dataset/train", "d.bin"),
    ("dataset/train", "d.idx"),
    ("dataset/train", "d.meta.json"),
    ("torch_dist", f"{CHECKPOINT}/.metadata"),
    ("torch_dist", f"{CHECKPOINT}/common.pt"),
    ("torch_dist", f"{CHECKPOINT}/metadata.json"),
    ("megatron", "latest_checkpointed_iteration.txt"),
    ("megatron", "release/mp_rank_00/model_optim_rng.pt"),
    ("meta", "params.json"),
    ("meta", "consolidated.00.pth"),
    ("meta", "checklist.chk"),
    ("peft", "adapter_config.json"),
    ("peft", "adapter_model.safetensors"),
    ("tokenizer/gpt2", "tokenizer.json"),
    ("tokenizer/llama2", "tokenizer.model"),
    ("tokenizer/tekken-json", "tekken.json"),
    ("tokenizer/ranks", "tokenizer.model"),
    ("records/jsonl", "data.jsonl"),
    ("records/parquet", "data.parquet"),
    ("scores", "scores"),
    ("report", "log.jsonl"),
    ("report", "events.jsonl"),
    ("trainer-logs", "titan.log"),
    ("calibration", "desk.json"),
    ("options-file", "run.yaml"),
)


def cases() -> Iterator[Hostile]:
    """Yield all of them."""
    for format, file in FILES:
        for name, put in PUTS.items():
            if (format, name) == ("options-file", "a pipe"):
                continue  # --config <(command) is one: it waits for its writer
            yield Hostile(f"{file} is {name}", format, _put(file, put))
    for target in (
        "../../secret.txt",
        "/etc/passwd",
        "/dev/zero",
        "..",
        ".",
        "",
        "a/../../secret.txt",
        "\0",
        "x" * 5_000,
    ):
        for format in ("hf", "hf/convert"):
            edit = with_json("model.safetensors.index.json", partial(_rename, target=target))
            yield Hostile(f"weight_map names {target[:20]!r}", format, edit)
        line = f"{'0' * 64}  {target}\n"
        for format, sums in (
            ("native", f"{CHECKPOINT}/SHA256SUMS"),
            ("export/convert", "SHA256SUMS"),
        ):
            yield Hostile(f"SHA256SUMS names {target[:20]!r}", format, _unsealed(sums, line))
    for name in CLAIMS:
        for format, place in (
            ("native", ""),
            ("native/auto", ""),
            ("torch_dist", ""),
            ("megatron", ""),
            ("megatron", "release"),
            ("meta", ""),
            ("native", CHECKPOINT),
            ("torch_dist", CHECKPOINT),
        ):
            yield Hostile(
                f"an empty {name} in {place or 'the folder'}", format, _claim(place, name)
            )
    for number in (
        "999999999",
        "9" * 5_000,
        "-3",
        "1e9",
        "2.5",
        "0x2",
        " 2 ",
        "2\n3",
        "\u0662",
        "release",
        "None",
        "",
    ):
        for format in ("native", "native/auto", "megatron", "torch_dist"):
            edit = replaced("latest_checkpointed_iteration.txt", number.encode())
            yield Hostile(f"the tracker says {number[:12]!r}", format, edit)


def _rename(content: dict[str, dict[str, str]], target: str) -> None:
    first = next(iter(content["weight_map"]))
    content["weight_map"][first] = target


def _unsealed(sums: str, line: str) -> Change:
    def change(folder: Path) -> None:
        with (folder / sums).open("a") as file:
            file.write(line)

    return change


CLAIMS = (
    "mp_rank_99999999",
    "mp_rank_00_999999999",
    "mp_rank_" + "9" * 200,
    "iter_99999999999",
    "iter_" + "9" * 200,
    "iter_\u0662",
    "__999999999_0.distcp",
    "consolidated.99999999.pth",
    "release",
    "iter_0000009.incomplete",
)


def _claim(place: str, name: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / place / name
        if "." in name:
            path.touch()
        else:
            path.mkdir(exist_ok=True)

    return change


def _put(file: str, put: Change) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        put(path)

    return change


def _fed_pipe(path: Path) -> None:
    """A pipe that somebody keeps open for writing and never writes to: reading waits for ever."""
    os.mkfifo(path)


def _secret(path: Path) -> None:
    """A link to a file beside the folder."""
    depth = len(path.parts) - path.parts.index("in")
    path.symlink_to(Path(*[".."] * (depth - 1)) / SECRET_FILE)


PUTS: Mapping[str, Change] = {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": _fed_pipe,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to a secret": _secret,
}
