"""The version of a clone at every kind of commit, of an sdist, of an archive and of a bare copy: with git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path

import pytest
from megatron_llama.config.version import NEXT, UNKNOWN, of_description, version
from packaging.version import Version

from tests.launcher import ROOT

FILES = ("megatron_llama/config/version.py", "megatron_llama/config/.gitattributes")
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **{"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
    **{f"GIT_{who}_{what}": "somebody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(clone: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(clone), *words], env=ENVIRON, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(clone: Path) -> str:
    """Add a line to a tracked file; the commit's hash as ``git describe`` says it."""
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# a change\n")
    git(clone, "commit", "--all", "--quiet", "--message", "A change")
    return "g" + git(clone, "rev-parse", "--short=8", "HEAD").decode().strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the files that decide, one commit and no tag."""
    clone = tmp_path / "clone"
    for name in (*FILES, "pyproject.toml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(clone))
    git(clone, "add", ".")
    commit(clone)
    return clone


def test_a_clone_is_what_its_tags_say(clone: Path, tmp_path: Path) -> None:
    second = commit(clone)
    found = [version(clone)]
    assert found == [f"{NEXT}.dev2+{second}"]
    git(clone, "tag", "v0.1.0rc1")
    found.append(version(clone))
    third = commit(clone)
    found.append(version(clone))
    git(clone, "tag", "not-a-version")
    assert found[1:] == ["0.1.0rc1", f"0.1.0rc2.dev1+{third}"] and version(clone) == found[-1]
    git(clone, "tag", "--annotate", "--message", "A release", "v0.1.0")  # beside a tag of another kind
    found.append(version(clone))
    commit(clone)
    later = commit(clone)
    found.append(version(clone))
    assert found[3:] == ["0.1.0", f"0.1.1.dev2+{later}"]
    assert sorted(found, key=Version) == found, "later commits have later versions"
    assert [str(Version(each)) for each in found] == found, "as packages spell them"
    (clone / "pyproject.toml").write_text("changed")
    (clone / "untracked").touch()
    assert version(clone) == f"0.1.1.dev2+{later}.dirty"
    git(clone, "worktree", "add", "--quiet", str(tmp_path / "tree"), "v0.1.0")
    assert version(tmp_path / "tree") == "0.1.0"


def test_a_shallow_clone_counts_no_commits(clone: Path, tmp_path: Path) -> None:
    last = commit(clone)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone}", "shallow")
    assert version(tmp_path / "shallow") == f"{NEXT}.dev0+{last}"


def test_a_hook_of_another_repository_changes_nothing(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(clone)
    before = version(clone)
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    assert version(clone) == before


def test_git_that_fails_or_is_not_there(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clone / "megatron_llama.egg-info").mkdir()
    (clone / "megatron_llama.egg-info" / "PKG-INFO").write_text("Name: megatron-llama\nVersion: 9.9\n")
    monkeypatch.setenv("PATH", str(clone))
    assert version(clone) == UNKNOWN, "what was built here at another commit says nothing of this one"
    monkeypatch.undo()
    (clone / ".git" / "HEAD").unlink()
    assert version(clone) == UNKNOWN


def archived(clone: Path, folder: Path) -> str:
    """The version that the sources of ``git archive`` have, unpacked."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(git(clone, "archive", "HEAD"))) as archive:
        archive.extractall(folder, filter="data")
    spec = spec_from_file_location("version", folder / FILES[0])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.version()
    assert isinstance(found, str)
    return found


def test_an_archive_knows_its_commit(clone: Path, tmp_path: Path) -> None:
    assert archived(clone, tmp_path / "archive") == f"{NEXT}.dev0+{commit_of(clone)}"
    git(clone, "tag", "v0.3.0")
    assert archived(clone, tmp_path / "archive") == "0.3.0"
    last = commit(clone)
    assert archived(clone, tmp_path / "archive") == f"0.3.1.dev1+{last}"


def commit_of(clone: Path) -> str:
    return "g" + git(clone, "rev-parse", "--short", "HEAD").decode().strip()


def test_what_was_built_has_the_version_of_its_build(tmp_path: Path) -> None:
    """As sdists (``PKG-INFO`` in egg-info) and installed wheels (``METADATA`` in dist-info) have it. A bare copy has none."""
    assert version(tmp_path) == UNKNOWN
    for folder, file in (("megatron_llama-1.2.dist-info", "METADATA"), ("megatron_llama.egg-info", "PKG-INFO")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("Metadata-Version: 2.4\nName: megatron-llama\nVersion: 1.2\n")
        assert version(tmp_path) == "1.2"
        shutil.rmtree(tmp_path / folder)


def test_what_git_says_otherwise_is_unknown() -> None:
    assert of_description("v") == of_description("release-1") == UNKNOWN
    assert of_description("v0.1.0-dirty") == "0.1.1.dev0+dirty"
