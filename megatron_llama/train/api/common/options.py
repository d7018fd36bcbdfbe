"""Options of a program, read like those of a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike, fspath
from typing import Any

from megatron_llama.config.megatron_names import ALIASES, MEGATRON
from megatron_llama.config.parse import Parsed, differences, parse
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError
from megatron_llama.train.api.common.hub import with_folders

Options = Config | Mapping[str, object] | str | PathLike[str] | None


def read_options(
    config: Options,
    more: Mapping[str, object],
    sections: Sequence[type[Any]],
    *,
    weights: bool = True,
) -> Parsed:
    """Read ``config`` and ``more`` options, which win over it. A Config gives the options that
    differ from their defaults, a mapping those that it names (also under the names of their
    sections, as in YAML), a path those of a YAML file. Names of the hub become folders; without
    ``weights`` these have only a model's shapes. Raises ConfigError with every problem."""
    words: list[str] = []
    given: dict[str, object] = {}
    if isinstance(config, str | PathLike):
        words = ["--config", fspath(config)]
    elif isinstance(config, Config):
        given = differences([getattr(config, item.name) for item in fields(config)])
    elif isinstance(config, Mapping):
        given = dict(config)
    elif config is not None:
        do = "give one of these, or the options by their names"
        expected = "a Config, a mapping of options, or the path of a YAML file"
        raise ConfigError("config", got=type(config).__name__, expected=expected, do=do)
    aliases = {**MEGATRON, **ALIASES}
    parsed = parse(words, sections, aliases=aliases, values=(given, more))
    return with_folders(parsed, planned=not weights, weights=weights)
