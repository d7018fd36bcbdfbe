"""Snapshots of repositories of the HuggingFace hub, in the hub's own cache, fetched by one process
of a machine if they are missing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_llama.config.json_file import read_weight_map
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import start_of_processes
from megatron_llama.train.api.common.hub import Content, HubName

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
)
MODEL = (*TOKENIZER, "generation_config.json", INDEX)


def fetch(name: HubName, content: Content, where: str, *, cached_only: bool = False) -> Path:
    """Return the folder of a repository's snapshot, with the files of ``content`` in it, fetched if
    they are not in the cache (HF_HOME). Without a network, or with HF_HUB_OFFLINE or
    ``cached_only``, the cache alone answers. Weights are safetensors: a pickle is never fetched.

    Of the processes of a start on one machine one fetches, and the others take its answer, a folder
    or an error. Raises ConfigError in one line; ``where`` is the option."""
    if find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"{where} {name}",
            got="no such path, and no package huggingface_hub to look for it on the hub",
            expected="a path that exists, or that package",
            do="check the path, or pip install '.[hub]'",
        )
    from huggingface_hub import constants

    if cached_only:
        return _snapshot(name, content, where, cached_only=True)
    asked = time.time()
    start = start_of_processes()
    words = [constants.ENDPOINT, str(name), content, socket.gethostname()]
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()
    with _locked(Path(constants.HF_HUB_CACHE) / ".locks" / "megatron_llama", digest) as answer:
        known = _read(answer)
        if known.get("start") == start:
            folder = Path(known.get("folder") or "")
            if known.get("folder") and _missing(folder, content) == []:
                return folder
            # An earlier error may not occur now. One that came while this process waited is its
            # own.
            if known.get("error") and known["time"] >= asked:
                raise ConfigError(known["error"])  # rank 0 says it for all who were told
        try:
            folder = _snapshot(name, content, where)
        except ConfigError as error:
            error.everywhere = False  # another machine may have no such error
            _write(answer, {"start": start, "error": str(error), "time": time.time()})
            raise
        _write(answer, {"start": start, "folder": str(folder), "time": time.time()})
        return folder


def _snapshot(name: HubName, content: Content, where: str, *, cached_only: bool = False) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    def download(files: Sequence[str], revision: str | None) -> Path:
        return Path(
            snapshot_download(
                name.repo,
                revision=revision,
                allow_patterns=list(files),
                local_files_only=cached_only,
            )
        )

    place = f"{constants.ENDPOINT}/{name.repo}"
    try:
        # As in transformers a single file wins over an index beside it.
        files = {"tokenizer": TOKENIZER, "shapes": MODEL, "model": (*MODEL, SINGLE)}
        folder = download(files[content], name.revision)
        if content == "model":
            # The commit is known now: the weights must be of the same one.
            download(_weights(folder), folder.name)
    except errors.GatedRepoError:
        got = "a gated repository"
        expected = "one that you have access to"
        do = f"accept its terms at {place}, then set HF_TOKEN or run `hf auth login`"
    except errors.RepositoryNotFoundError:
        got = f"no such path, and no such repository at {constants.ENDPOINT}"
        expected = "a path, or the name of a model on the hub"
        do = "check it; for a private repository set HF_TOKEN or run `hf auth login`"
    except errors.RevisionNotFoundError:
        got = "no such revision"
        expected = f"a branch, tag or commit of {place}"
        do = "check it"
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE or cached_only
        why = "HF_HUB_OFFLINE is set" if offline else _first_line(error.__cause__ or error)
        got = f"no such path, and not in the cache {constants.HF_HUB_CACHE}; {why}"
        expected = "a path, or a model that is in the cache or can be fetched"
        do = f"where there is a network run `hf download {name.repo}` with the same HF_HOME"
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        got = f"{type(error).__name__}: {_first_line(error)}"
        expected = f"the files of {place}"
        do = "start again: what has arrived is kept"
    else:
        missing = _missing(folder, content)
        if not missing:
            return folder
        got = f"a snapshot without {', '.join(missing)}, in {folder}"
        expected = "a model in safetensors" if content == "model" else "the files of a model"
        if content == "tokenizer":
            expected = "a tokenizer"
        do = "give a repository that has them; what was cached in part needs a network"
    raise ConfigError(f"{where} {name}", got=got, expected=expected, do=do)


def _weights(folder: Path) -> list[str]:
    """Return the files of a snapshot's weights: the single file, or those of its index, without
    second copies beside them (``consolidated.safetensors``, ``original/``). Raises CheckpointError
    for a damaged index."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return [SINGLE]
    files = set(read_weight_map(index).values())
    # The hub takes a name as a pattern, and as a file of a repository: neither may lead elsewhere.
    return sorted(file for file in files if re.fullmatch(r"[\w.-]+\.safetensors", file))


def _missing(folder: Path, content: Content) -> list[str]:
    """Return the files of ``content`` that a snapshot lacks: without a network the cache may have
    only some."""
    if content == "tokenizer":
        has_tokenizer = any((folder / file).is_file() for file in TOKENIZER[:2])
        return [] if has_tokenizer else [" or ".join(TOKENIZER[:2])]
    wanted = ["config.json", *(_weights(folder) if content == "model" else ())]
    return [file for file in wanted if not (folder / file).is_file()]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[Path | None]:
    """Hold a lock of this machine, and yield the file for the answer of its first holder. None
    where the cache cannot be written: then nothing can be fetched, and each process only reads."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("a")
    except OSError:
        yield None
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the file's end releases it, as does the process's
        yield folder / f"{name}.json"


def _read(path: Path | None) -> dict[str, Any]:
    try:
        value = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path | None, answer: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(answer), encoding="utf-8")
