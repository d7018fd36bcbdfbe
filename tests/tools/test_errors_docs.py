"""The page of errors: what the code says, under the key of the place that says it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from megatron_llama.config.fields import Fields
from megatron_llama.config.parse import parse
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ConfigError
from megatron_llama.tune.sft.problems import wrong_kind
from tools.errors_docs.match import site_of_text
from tools.errors_docs.page import errors_markdown, unprovoked
from tools.errors_docs.sites import PASSING_ON, all_sites, sites_of

from tests.plant import ERROR_KEYS
from tests.refused import keys, refused

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    """All sentences can be read in a row there, and a change of one is seen."""
    assert (ROOT / "docs" / "errors.md").read_text() == errors_markdown(), "run python -m tools.errors_docs docs/errors.md"


def texts(tmp_path: Path, source: str) -> dict[str, str]:
    """What the sites of a file say, by their keys."""
    path = tmp_path / "room" / "file.py"
    path.parent.mkdir()
    path.write_text(source)
    return {site.key: site.text for site in sites_of(path, tmp_path)}


def test_a_sentence_is_read_as_a_user_reads_it(tmp_path: Path) -> None:
    """Words of variables and constants stand in it; each branch has its own; what only a run knows is a placeholder."""
    source = '''
from megatron_llama.checkpoint.model_folders.model_fields import MATCHING_FILES
LARGEST = 2**11
NAMES = ("one", "two")

class Reader:
    def check(self, path, count):
        got = f"{count} files"
        if count > LARGEST:
            raise DataError(path, got=got, expected=f"at most {LARGEST:,}", do=MATCHING_FILES)
        do = "give " + " or ".join(NAMES)
        if self.known:
            got += " here"
        expected = "one" if count else "none"
        return describe(f"{path} {self.name!r}", got=got, expected=expected, do=do)
'''
    matching = "take the files, args and config that belong together"
    assert texts(tmp_path, source) == {
        "room.file.Reader.check": f"{{path}}: got {{count}} files, expected at most 2,048; {matching}",
        "room.file.Reader.check:2": "{path} {name}: got [{count} files here | {count} files], expected [one | none]; give one or two",
    }


def test_titles_and_whole_messages_have_keys_and_what_passes_them_on_has_none(tmp_path: Path) -> None:
    source = '''
def refuse(problems, error):
    if problems:
        raise ConfigError(listing(f"{len(problems)} things are wrong:", problems))
    if error:
        raise ConfigError(str(error))
    raise DataError("nothing is there")
'''
    assert texts(tmp_path, source) == {"room.file.refuse": "{number of problems} things are wrong:", "room.file.refuse:2": "nothing is there"}


def test_a_line_of_the_package_makes_one_sentence() -> None:
    """So that a line number is enough to know which one it is; keys are unique, too."""
    places = Counter((site.file, site.lines, "title" in site.parts) for site in all_sites())
    assert [place for place, count in places.items() if count > 1] == []
    assert len({site.key for site in all_sites()}) == len(all_sites()) > 900


def test_what_passes_words_on_is_there() -> None:
    """A function that was renamed would be a site without words, and its callers none."""
    for place in PASSING_ON:
        *module, _ = place.split(".")
        while not (path := (ROOT / "megatron_llama").joinpath(*module).with_suffix(".py")).exists():
            module.pop()
        assert f"def {place.rpartition('.')[2]}(" in path.read_text(), place


def test_an_error_is_known_by_its_place() -> None:
    """Also where a method says the words of its caller, and where an error speaks only when its place is known."""
    with pytest.raises(ConfigError) as raised:
        parse(["--seed", "1.5", "--micro-batchsize", "2"], config_sections(), aliases={})
    assert keys(raised.value) == ["config.parse._Reader._read_option", "config.parse._Reader._refuse_unknown:2"]
    fields = Fields({"n": True}, "args.json", do="copy it again")
    fields.integer("n", low=2)
    said = refused(fields.problems[0])
    assert (said.key, said.where, said.do) == ("config.fields.Fields.integer", "args.json n", "copy it again")
    example = wrong_kind("a reason", "text", 3, "a string").at("a.jsonl:7")
    assert refused(str(example)).key == "tune.sft.problems.wrong_kind"
    assert refused(str(example)).where == "a.jsonl:7: field 'text'"


def test_what_a_process_prints_is_known_by_its_words(tmp_path: Path) -> None:
    """A process of its own: nobody has seen it make the sentence."""
    words = ["inspect", "dataset", str(tmp_path / "none")]
    ended = subprocess.run([sys.executable, "-m", "megatron_llama", *words], cwd=ROOT, capture_output=True, text=True)
    said = refused(ended.stderr)
    assert (said.key.startswith("data.indexed."), said.where) == (True, f"{tmp_path}/none.idx"), said
    assert refused(f"error on rank 1: rank 1: {said.text} (1 of 2 ranks failed)") == said


def test_a_text_of_no_place_is_no_sentence() -> None:
    with pytest.raises(AssertionError, match="no such sentence"):
        refused("zap: no")
    assert site_of_text("zap: no") is None


def test_what_no_test_provokes_is_listed(tmp_path: Path) -> None:
    """Also by the processes that a session with --error-keys starts."""
    file = tmp_path / "keys"
    code = "from tests import planted; from tests.tools.test_errors_docs import refuse; refuse()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, ERROR_KEYS: str(file)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    left = {site.key for site in unprovoked(file.read_text().splitlines())}
    assert {site.key for site in all_sites()} - left == {"config.fields.Fields.integer", "tune.sft.problems.wrong_kind"}


def refuse() -> None:
    """Make two sentences."""
    Fields({"n": True}, "args.json").integer("n")
    wrong_kind("a reason", "text", 3, "a string").at("a.jsonl:7")
