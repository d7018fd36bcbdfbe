"""The parser of every command: one YAML file and command-line flags -> frozen dataclasses
("sections").

A section is a frozen dataclass. Its fields are the options; the string under a field is its help,
which ``help.py`` prints. ``option.py`` has the other rules of a field. Values stay text until the
field's annotation converts them, so that YAML and the command line understand the same spellings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_llama.config.limits import LARGEST_INTEGER, OPTION_FILE_CHARACTERS, SHOWN_OPTION
from megatron_llama.config.megatron_names import Alias
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.option import NOT_NEGATIVE, PLAIN, Check, Rules, rules_of

T = TypeVar("T")

_FLAG = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_BOOLEANS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
)
_NUMBERS = (int, float, int | None)


@dataclass(frozen=True)
class Option:
    """One field of one section."""

    name: str
    section: type[Any]
    kind: Any
    default: Any
    rules: Rules = PLAIN
    """The other rules of the field."""

    @property
    def flag(self) -> str:
        """The option as written on a command line."""
        return flag(self.name)

    @property
    def check(self) -> Check | None:
        """The condition on a value, whatever the other options are."""
        return self.rules.check or (NOT_NEGATIVE if self.kind in _NUMBERS else None)


@dataclass(frozen=True)
class Parsed:
    """The sections of a command line and its YAML file, and the source of each value."""

    instances: Mapping[type[Any], Any]
    sources: Mapping[str, str]
    """Field name -> ``--lr`` or ``run.yaml:3 lr``, for the given fields."""
    notes: tuple[str, ...] = ()
    """A line for each meaning of accepted keys that set nothing, since it holds here anyway, and
    one for every flag that replaced an earlier one."""

    def get(self, section: type[T]) -> T:
        """Return the instance of ``section``. Fields that were not given have their defaults."""
        instance: T = self.instances[section]
        return instance

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the fields given in the YAML file or as flags, restated defaults included."""
        return frozenset(self.sources)

    def differences(self) -> dict[str, Any]:
        """Return the fields whose value is not the default."""
        return differences(self.instances.values())


@dataclass(frozen=True)
class _Given:
    """A key as it was written. ``raw`` holds the words after a flag, or the value of YAML: text, a
    list of texts, a mapping or None (null). ``group`` is the name of the key's section in YAML."""

    key: str
    raw: Any
    where: str
    group: str | None = None

    @property
    def is_flag(self) -> bool:
        return self.where.startswith("--")


def flag(name: str) -> str:
    """``micro_batch_size`` -> ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


def section_name(section: type[Any]) -> str:
    """``ParallelConfig`` -> ``parallel``: the name of the section's group in YAML."""
    return section.__name__.removesuffix("Config").lower()


def options_of(sections: Sequence[type[Any]]) -> dict[str, Option]:
    """Return every option by field name. Names are unique over the sections: flags name no
    section."""
    table: dict[str, Option] = {}
    for section in sections:
        for option in _own_options(section):  # type: ignore[arg-type]
            assert option.name not in table and option.name != "config", (
                f"option {option.name} is defined twice"
            )
            table[option.name] = option
    return table


@cache  # `prove --fuzz` reads thousands of command lines, and annotations are slow to evaluate
def _own_options(section: type[Any]) -> tuple[Option, ...]:
    kinds = get_type_hints(section)
    return tuple(
        Option(
            item.name,
            section,
            kinds[item.name],
            item.default_factory() if item.default_factory is not MISSING else item.default,
            rules_of(section).get(item.name, PLAIN),
        )
        for item in fields(section)
    )


def differences(instances: Iterable[Any]) -> dict[str, Any]:
    """Return the fields of the sections whose value is not the default, in order of definition."""
    changed: dict[str, Any] = {}
    for instance in instances:
        for name, option in options_of([type(instance)]).items():
            value = getattr(instance, name)
            if value != option.default:
                changed[name] = value
    return changed


def parse(
    argv: Sequence[str],
    sections: Sequence[type[Any]],
    *,
    aliases: Mapping[str, Alias],
    owners: Callable[[str], Sequence[str]] = lambda name: (),
    values: Sequence[Mapping[str, object]] = (),
) -> Parsed:
    """Read ``--config FILE`` and flags into instances of ``sections``. Flags win over the file. The
    last of repeated flags wins, with a note. A program gives ``values`` instead of flags, by the
    names of options, also under those of their sections. Later ones win.

    ``aliases`` maps snake-case names to options; an alias of a field in none of the sections is
    unknown to this command. ``owners`` names the other commands with an option, for the error about
    an unknown name. Raises ConfigError with every problem of the file and the flags.
    """
    reader = _Reader(sections, aliases, owners)
    flags, file = reader.read_command_line(argv)
    settings = reader.convert(reader.read_yaml(file)) if file is not None else {}
    settings |= reader.convert(flags)
    for given in values:
        settings |= reader.convert(reader.read_values(given))
    for switch, alias in reader.implying:
        assert alias.field is not None and alias.implies is not None
        chosen, _ = settings[alias.field]
        if chosen == read(reader.options[alias.field].kind, alias.value):  # and not replaced since
            name, text = alias.implies
            settings.setdefault(name, (read(reader.options[name].kind, text), switch))
    reader.problems.extend(
        describe(
            option.flag, got="nothing", expected=expected(option.kind), do=f"give {option.flag}"
        )
        for name, option in reader.options.items()
        if option.default is MISSING and name not in settings and name not in reader.refused
    )
    if reader.problems:
        raise ConfigError(listing("These options cannot be used:", reader.problems))
    instances = {}
    for section in sections:
        own = {
            name: value
            for name, (value, _) in settings.items()
            if reader.options[name].section is section
        }
        instances[section] = section(**own)
    sources = MappingProxyType({name: where for name, (_, where) in settings.items()})
    unneeded = (f"{', '.join(keys)}: {said}" for said, keys in reader.unneeded.items())
    return Parsed(MappingProxyType(instances), sources, (*unneeded, *reader.notes))


def expected(kind: Any) -> str:
    """Return the values that an annotation takes, in words."""
    inner, optional = strip_optional(kind)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(get_args(inner))
    if get_origin(inner) is tuple:
        return f"one or more, separated by spaces: {expected(get_args(inner)[0])}"
    if get_origin(inner) is dict:
        return (
            'a mapping (on the command line JSON, such as \'{"rope_type": "linear", "factor": '
            "2.0}')"
        )
    words = {
        int: "an integer such as 4, 1_000 or 2e8",
        float: "a number such as 0.1 or 3e-4",
        bool: "true or false",
        str: "text",
    }[inner]
    return words + " or null" if optional and inner is not str else words


def read(kind: Any, raw: Any) -> Any:
    """Convert text (a list of texts, a mapping, None) to a value of the annotation. Raises
    ValueError for other text, and RepeatedKey for a mapping that has a key twice."""
    inner, optional = strip_optional(kind)
    if optional and (raw is None or (raw == "null" and inner is not str)):
        return None
    origin = get_origin(inner)
    if origin is tuple:
        return tuple(
            read(get_args(inner)[0], item) for item in (raw if isinstance(raw, list) else [raw])
        )
    if origin is dict:
        return _read_mapping(raw)
    if not isinstance(raw, str):
        raise ValueError(raw)
    if origin is Literal:
        if raw not in get_args(inner):
            raise ValueError(raw)
        return raw
    return raw if inner is str else _READERS[inner](raw)


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """Return the annotation without ``| None``, and whether it had that."""
    if get_origin(kind) in (Union, UnionType):
        inner = [member for member in get_args(kind) if member is not NoneType]
        assert len(inner) == 1, f"only X | None is supported, not {kind}"
        return inner[0], True
    return kind, False


def _read_int(text: str) -> int:
    if "e" not in text.lower():
        number = int(text)
        if abs(number) > LARGEST_INTEGER:
            raise ValueError(text)
        return number
    value = float(text)
    # Beyond 2^53 a float no longer names one integer.
    if not value.is_integer() or abs(value) > 2**53:
        raise ValueError(text)
    return int(value)


def _read_float(text: str) -> float:
    value = float(text)
    if value - value != 0.0:  # nan or infinite
        raise ValueError(text)
    return value


def _read_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


class RepeatedKey(ValueError):
    """A mapping in JSON names a key twice; Python's reader would silently take the last."""


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, as ``object_pairs_hook``. Raises RepeatedKey."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise RepeatedKey(f"{key} stands there twice")
        entries[key] = value
    return entries


def _read_mapping(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        import json

        try:
            raw = json.loads(raw, object_pairs_hook=without_repeats)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
    if not isinstance(raw, dict):
        raise ValueError(raw)
    return raw


_READERS: Mapping[Any, Any] = MappingProxyType(
    {int: _read_int, float: _read_float, bool: _read_bool}
)


class _Reader:
    """Collects values and problems of one command line and its YAML file."""

    def __init__(
        self,
        sections: Sequence[type[Any]],
        aliases: Mapping[str, Alias],
        owners: Callable[[str], Sequence[str]],
    ) -> None:
        self.options = options_of(sections)
        self.owners = owners
        self.names_elsewhere = aliases
        self.trains = "train_iters" in self.options
        # Aliases that set nothing are Megatron's own, for the commands that take a run's options.
        self.aliases = {
            name: alias
            for name, alias in aliases.items()
            if (self.trains if alias.field is None else alias.field in self.options)
        }
        assert not self.aliases.keys() & self.options.keys(), "an alias hides an option"
        self.groups = {section_name(section): section for section in sections}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.unneeded: dict[str, list[str]] = {}
        """Words about keys that set nothing -> those keys, as written."""
        self.implying: list[tuple[str, Alias]] = []
        """Switches that are on and imply another option: as written, with their alias."""
        self.refused: set[str] = set()
        """Options that were given wrongly: they are not reported as missing too."""

    def problem(self, where: str, *, got: object, expected: object, do: str) -> None:
        self.problems.append(describe(where, got=got, expected=expected, do=do))

    def read_command_line(self, argv: Sequence[str]) -> tuple[list[_Given], str | None]:
        """Return the command line as keys with their words, and the file named by ``--config``."""
        given: list[_Given] = []
        files: list[list[str]] = []
        for name, inline, words in _flags_with_words(argv):
            if name is None:
                self._refuse_stray_words(words)
                continue
            if inline is not None:
                self._refuse_stray_words(words)
                words = [inline]
            key = name.replace("-", "_")
            where = "--" + name
            if key == "config":
                files.append(words)
            elif (negated := self._negated(key)) is not None:
                if words:
                    self.problem(
                        where,
                        got=" ".join(words),
                        expected="no value",
                        do=f"give {where} or {negated.flag} true|false",
                    )
                else:
                    given.append(_Given(negated.name, ["false"], where))
            else:
                given.append(_Given(key, words, where))
        if [len(words) for words in files] not in ([], [1]):
            got = " ".join(word for words in files for word in words)
            self.problem(
                "--config",
                got=got or "nothing",
                expected="one YAML file",
                do="give --config FILE once",
            )
            return given, None
        return given, files[0][0] if files else None

    def _negated(self, key: str) -> Option | None:
        """Return the boolean that ``--no-<boolean>`` switches off."""
        option = self.options.get(key.removeprefix("no_"))
        known = key in self.options or key in self.aliases
        return None if known or option is None or option.kind is not bool else option

    def read_values(self, values: Mapping[str, object]) -> Iterator[_Given]:
        """Yield the values of a program as keys of YAML."""
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if isinstance(value, Mapping) and name in self.groups:
                for inner, content in value.items():
                    below = _Given(
                        str(inner).replace("-", "_"), _as_text(content), f"{key}.{inner}", name
                    )
                    yield self._with_section_name(below)
            else:
                yield _Given(name, _as_text(value), name)

    def read_yaml(self, path: str) -> list[_Given]:
        """Return the keys of a YAML file, flat or one level down under a section's name."""
        try:
            # A link may lead to a device that has no end.
            with open(path, encoding="utf-8") as file:
                text = file.read(OPTION_FILE_CHARACTERS + 1)
        except (OSError, UnicodeDecodeError) as error:
            self.problem(
                f"--config {path}", got=error, expected="a readable YAML file", do="check the path"
            )
            return []
        if len(text) > OPTION_FILE_CHARACTERS:
            self.problem(
                f"--config {path}",
                got=f"more than {OPTION_FILE_CHARACTERS:,} characters",
                expected="a file of options",
                do="check the path",
            )
            return []
        return list(self._yaml_keys(path, text))

    def _yaml_keys(self, path: str, text: str) -> Iterator[_Given]:
        import yaml

        from megatron_llama.config.bounded_yaml import bounded_loader

        try:
            loader = bounded_loader(text)
            root = loader.get_single_node()
            if root is None:
                return
            if not isinstance(root, yaml.MappingNode):
                line = root.start_mark.line + 1
                self.problem(
                    f"{path}:{line}",
                    got="something else",
                    expected="key: value lines",
                    do="write one option per line",
                )
                return
            for key, node in root.value:
                name = str(key.value).replace("-", "_")
                if isinstance(node, yaml.MappingNode) and name in self.groups:
                    for inner, value in node.value:
                        item = self._yaml_given(loader, path, inner, value, name)
                        yield self._with_section_name(item)
                elif name not in self.groups or node.tag != "tag:yaml.org,2002:null":
                    yield self._yaml_given(loader, path, key, node, None)
        except (yaml.YAMLError, ValueError) as error:  # a date of month 13, a number of many digits
            mark = getattr(error, "problem_mark", None)
            line = None if mark is None else mark.line
            if isinstance(error, yaml.reader.ReaderError):
                line = text.count("\n", 0, error.position)
            where = path if line is None else f"{path}:{line + 1}"
            cause = getattr(error, "problem", None) or " ".join(str(error).split())
            self.problem(where, got=cause, expected="valid YAML", do="mend that line")

    def _yaml_given(self, loader: Any, path: str, key: Any, node: Any, group: str | None) -> _Given:
        where = f"{path}:{key.start_mark.line + 1} {key.value}"
        self._refuse_repeated_keys(path, node)
        return _Given(str(key.value).replace("-", "_"), _yaml_raw(loader, node), where, group)

    def _refuse_repeated_keys(self, path: str, node: Any) -> None:
        """Report keys that stand twice in one mapping: YAML would silently take the last."""
        if node.id == "sequence":
            for item in node.value:
                self._refuse_repeated_keys(path, item)
        if node.id != "mapping":
            return
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in lines:
                self.problem(
                    f"{path}:{line} {name}",
                    got=f"it again after line {lines[name]}",
                    expected=f"one value of {name}",
                    do="give it once",
                )
            lines[name] = line
            self._refuse_repeated_keys(path, value)

    def _with_section_name(self, item: _Given) -> _Given:
        """Return the key with the name of its section, which it may leave out under that name:
        ``rank`` under ``lora:`` is ``lora_rank``."""
        name = f"{item.group}_{item.key}"
        return (
            replace(item, key=name)
            if item.key not in self.options and name in self.options
            else item
        )

    def convert(self, given: Iterable[_Given]) -> dict[str, tuple[Any, str]]:
        """Return option -> (value, source). The last of repeated flags counts, as scripts that end
        in ``"$@"`` expect, and a note names what it replaced; one that ``repeats`` collects its
        values. A second value is a problem in a file, which says everything once. It is also one
        between a Megatron switch that stands for a value and another flag: order cannot decide."""
        values: dict[str, tuple[Any, str]] = {}
        switches: dict[str, str] = {}
        for item in given:
            pair = self._read_given(item)
            if pair is None:
                continue
            name, value = pair
            alias = self.aliases.get(item.key)
            switch = item.key if alias is not None and alias.value is not None else name
            same = switches.setdefault(name, switch) == switch
            if name in values and item.is_flag and self.options[name].rules.repeats:
                values[name] = (*values[name][0], *value), item.where
                continue
            before, where = values.setdefault(name, (value, item.where))
            if before == value:
                continue
            if item.is_flag and same:
                values[name] = value, item.where
                several = (
                    f": give several values after one {item.where}"
                    if isinstance(value, tuple)
                    else ""
                )
                self.notes.append(
                    f"{item.where} {_show(value)} replaces {where} {_show(before)}, which stands "
                    f"before it{several}"
                )
                continue
            got = f"{_show(value)} after {_show(before)} ({where})"
            self.problem(item.where, got=got, expected=f"one value of {name}", do="give it once")
        return values

    def _read_given(self, item: _Given) -> tuple[str, Any] | None:
        alias = self.aliases.get(item.key)
        name = alias.field if alias is not None else item.key
        if name is not None and (name not in self.options or not self._in_group(item, name)):
            self._refuse_unknown(item)
            return None
        if alias is None:
            return self._read_option(item, self.options[item.key])
        return (
            self._read_switch(item, alias)
            if alias.value is not None
            else self._read_renamed(item, alias)
        )

    def _in_group(self, item: _Given, name: str) -> bool:
        return item.group is None or self.options[name].section is self.groups[item.group]

    def _read_option(self, item: _Given, option: Option) -> tuple[str, Any] | None:
        inner, _ = strip_optional(option.kind)
        raw = item.raw
        if isinstance(raw, list) and get_origin(inner) is not tuple and item.is_flag:
            raw = self._one_word(item, "true" if inner is bool else option.rules.bare, option.kind)
            if raw is None:
                self.refused.add(option.name)
                return None
        try:
            if raw == []:
                raise ValueError("no words")
            word = dict(option.rules.words).get(raw, raw) if isinstance(raw, str) else raw
            return option.name, read(option.kind, word)
        except (ValueError, OverflowError) as error:
            self.refused.add(option.name)
            if isinstance(error, RepeatedKey):
                remedy = f"{error}: give it once"
            else:
                remedy = (
                    self._nearest_choice(inner, raw)
                    or _separated(item, inner, raw)
                    or "correct the value"
                )
            self.problem(
                item.where,
                got=_cut(_show(raw)) if raw != [] else "nothing",
                expected=expected(option.kind),
                do=remedy,
            )
            return None

    def _one_word(self, item: _Given, absent: str | None, kind: Any) -> str | None:
        """Return the single word after a flag, or ``absent`` when there is none."""
        words = item.raw or ([absent] if absent is not None else [])
        if len(words) == 1:
            return str(words[0])
        got = f"{len(words)} words: {' '.join(words)}" if words else "nothing"
        remedy = "quote text that has spaces" if words else f"write {item.where} VALUE"
        self.problem(item.where, got=got, expected=expected(kind), do=remedy)
        return None

    def _read_renamed(self, item: _Given, alias: Alias) -> tuple[str, Any] | None:
        raw = item.raw
        if alias.convert is not None:
            word = self._one_word(item, None, str) if isinstance(raw, list) else raw
            if word is None and isinstance(raw, list):
                return None
            try:
                raw = alias.convert(str(word))
            except ValueError as error:
                self.problem(item.where, got=word, expected=error, do=alias.remedy)
                return None
        if alias.field is None:
            self.unneeded.setdefault(alias.help, []).append(item.where)
            return None
        return self._read_option(_Given(alias.field, raw, item.where), self.options[alias.field])

    def _read_switch(self, item: _Given, alias: Alias) -> tuple[str, Any] | None:
        word = self._one_word(item, "true", bool) if isinstance(item.raw, list) else item.raw
        if word is None and isinstance(item.raw, list):
            return None
        on = _BOOLEANS.get(str(word).lower())
        stands_for = _BOOLEANS.get(alias.value or "")
        if on is None:
            self.problem(
                item.where, got=_show(item.raw), expected="true or false", do="correct the value"
            )
        elif alias.field is None:
            if on != stands_for:
                self.problem(item.where, got=str(on).lower(), expected=alias.value, do=alias.remedy)
            else:
                self.unneeded.setdefault(alias.help, []).append(item.where)
        elif on or stands_for is not None:
            # `untie...: false` says tied; a switch that stands for a word has no such opposite.
            text = alias.value if on else str(not stands_for).lower()
            if on and alias.implies is not None:
                self.implying.append((item.where, alias))
            return alias.field, read(self.options[alias.field].kind, text)
        else:
            self.problem(
                item.where,
                got="false",
                expected="true",
                do=f"leave it out and set {flag(alias.field)}",
            )
        return None

    def _refuse_stray_words(self, words: Sequence[str]) -> None:
        if words:
            do = "write a flag before it (flags start with two dashes)"
            self.problem("command line", got=" ".join(words), expected="--option value", do=do)

    def _refuse_unknown(self, item: _Given) -> None:
        name = self.aliases[item.key].field if item.key in self.aliases else item.key
        if name in self.options:
            section = section_name(self.options[name].section)
            self.problem(
                item.where,
                got=f"it under {item.group}:",
                expected=f"it under {section}: or at the top",
                do="move it",
            )
            return
        got = "an unknown flag" if item.is_flag else "an unknown key"
        do = self._remedy(item)
        self.problem(item.where, got=got, expected="an option of this command", do=do)

    def _remedy(self, item: _Given) -> str:
        """Return the remedy for a name that this command does not know: another trainer's name of
        an option, an option of another command, or a misspelt name."""
        if item.key in self.groups:
            return f"write its options below it, as in {item.key}: {{option: value}}"
        if self.trains:
            # Names of other trainers are loaded only for an error.
            from megatron_llama.config.foreign_names import remedy_for

            if foreign := remedy_for(item.key):
                return foreign
        remedies = []
        owners = self._other_commands(item.key)
        # A name that is known elsewhere is hardly another one misspelt.
        is_known = bool(owners) or item.key in self.names_elsewhere
        if near := self._longer(item) or ([] if is_known else self._similar(item)):
            names = [flag(name) if item.is_flag else name for name in near]
            remedies.append(f"did you mean {in_words(names, 'or')}?")
        if owners:
            have = "have" if owners[1:] else "has"
            remedies.append(f"{in_words(owners, 'and')} {have} {flag(item.key)}")
        if not remedies:
            others = "; docs/migrating.md has the names of other trainers" if self.trains else ""
            remedies.append(f"--help lists the options{others}")
        return " ".join(remedies)

    def _other_commands(self, key: str) -> Sequence[str]:
        """Return the other commands that have an option of this name, a switch that switches one
        off, or Megatron's name of one."""
        alias = self.names_elsewhere.get(key)
        if alias is not None:
            return self.owners(alias.field) if alias.field is not None else ()
        return self.owners(key) or self.owners(key.removeprefix("no_"))

    def _known(self, item: _Given) -> list[str]:
        known = [*self.options, *(name for name, alias in self.aliases.items() if alias.field)]
        return [*known, *self.groups] if isinstance(item.raw, dict) else known

    def _longer(self, item: _Given) -> list[str]:
        """Return up to three names that begin or end like the key; none if there are more."""
        key = item.key
        longer = [
            name for name in self._known(item) if name.startswith(key) or name.endswith(f"_{key}")
        ]
        return longer if len(longer) <= 3 else []

    def _similar(self, item: _Given) -> list[str]:
        """Return a name that is spelt similarly."""
        from difflib import get_close_matches

        # Most names that differ in a quarter of their letters mean something else.
        return get_close_matches(item.key, self._known(item), 1, 0.8)

    def _nearest_choice(self, kind: Any, raw: Any) -> str | None:
        from difflib import get_close_matches

        choices = get_args(kind) if get_origin(kind) is Literal else ()
        near = get_close_matches(str(raw), choices, 1, 0.8)
        return f"did you mean {near[0]}?" if near else None


def in_words(names: Sequence[str], last: str) -> str:
    """Return ``a, b or c``. There is at least one name."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _separated(item: _Given, kind: Any, raw: Any) -> str | None:
    """Return the remedy for a list whose values were given as one text: ``3,1`` or, in YAML, ``3
    1``."""
    if get_origin(kind) is not tuple:
        return None
    entries = raw if isinstance(raw, list) else [raw]
    if any(isinstance(entry, dict) for entry in entries):
        return "put a text with a colon in it in quotes"
    if not all(isinstance(entry, str) for entry in entries):
        return None
    words = re.split(r"[,;\s]+", " ".join(raw) if isinstance(raw, list) else str(raw))
    if len(words) < 2 or words == raw:
        return None
    if item.is_flag:
        return f"separate them by spaces: {item.where} {' '.join(words)}"
    return f"write [{', '.join(words)}]"


def _flags_with_words(argv: Sequence[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Yield (flag name, text after ``=``, the words up to the next flag). Words before any flag
    come with no name."""
    bounds = [*(i for i, word in enumerate(argv) if _FLAG.fullmatch(word)), len(argv)]
    if bounds[0] > 0:
        yield None, None, list(argv[: bounds[0]])
    for start, end in pairwise(bounds):
        name, equals, inline = argv[start][2:].partition("=")
        yield name, inline if equals else None, list(argv[start + 1 : end])


def _yaml_raw(loader: Any, node: Any) -> Any:
    """Return a node whose scalars keep their text: YAML 1.1 would read 3e-4 as text, and the
    dataset name 007 as a number."""
    if node.id == "scalar":
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if node.id == "sequence":
        return [_yaml_raw(loader, item) for item in node.value]
    return loader.construct_object(node, deep=True)


def _as_text(value: object) -> Any:
    """Return a value of Python as YAML would have it: text, a list of texts, a mapping or None."""
    if value is None or isinstance(value, str | Mapping):
        return dict(value) if isinstance(value, Mapping) else value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence):
        return [_as_text(item) for item in value]
    return str(value)  # numbers (a float's text names the same float) and paths


def _cut(text: str) -> str:
    """Return a text, cut to the length of a message."""
    return text if len(text) <= SHOWN_OPTION else f"{text[:SHOWN_OPTION]}..."


def _show(value: Any) -> str:
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else " ".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )
