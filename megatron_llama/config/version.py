"""The version of this package, from git's tags, or as remembered by what was built from them.

``pyproject.toml`` calls ``version`` when a wheel is built, and loads this file alone to do so:
it imports the standard library only."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path
from subprocess import SubprocessError, run

NEXT = "0.1.0"
"""The next release, for a clone without tags."""
UNKNOWN = f"{NEXT}.dev0+unknown"
ARCHIVED = "$Format:%(describe:tags=true,match=v[0-9]*,abbrev=8) %h$"
"""``git archive``, which makes the archives that GitHub offers, replaces what is between the dollar
signs (``.gitattributes``): ``v0.1.0-3-gabcdef12 abcdef12``, without a tag the hash alone."""


def version(root: Path | None = None, archived: str = ARCHIVED) -> str:
    """Return the version of the package in the folder ``root``, by default of this file's.

    In a clone: ``0.1.0`` at the tag ``v0.1.0``, ``0.1.1.dev3+gabcdef12`` three commits later, and
    with ``.dirty`` at the end if tracked files differ from the commit. Without a tag the commits
    since the first one count towards ``NEXT``; a shallow clone does not know their number and says
    0. In an installed package or an unpacked sdist: the version at its build. In an archive of git:
    the version that git wrote into ``ARCHIVED``. Otherwise ``UNKNOWN``.
    """
    root = Path(__file__).parents[2] if root is None else root
    if (root / ".git").exists():  # a folder, or the file of a worktree
        return _of_clone(root)
    # Only in this folder: a copy of the sources must not take the version of an installed package.
    for built in distributions(name="megatron-llama", path=[str(root)]):
        return built.version
    if not archived.startswith("$"):
        described, _, commit = archived.rpartition(" ")
        return of_description(described) if described else f"{NEXT}.dev0+g{commit}"
    return UNKNOWN


def of_description(description: str) -> str:
    """Return the version of the output of ``git describe --tags``: ``v0.1.0`` or
    ``v0.1.0-3-gabcdef12``, with ``-dirty`` where files were changed. After a tag it is a
    development version of the next release (``0.1.1.dev3``, ``0.2.0rc2.dev3``), later than the tag
    and earlier than that release."""
    match = re.fullmatch(
        r"v((?:[0-9][\w.]*?)?)([0-9]+)(?:-([0-9]+)-(g[0-9a-f]+))?(-dirty)?", description
    )
    if match is None:
        return UNKNOWN
    before, last, distance, commit, dirty = match.groups()
    if distance is None and dirty is None:
        return f"{before}{last}"
    local = ".".join(label for label in (commit, dirty and "dirty") if label)
    return f"{before}{int(last) + 1}.dev{distance or 0}+{local}"


def _of_clone(root: Path) -> str:
    """Return git's version. It is unknown without git, or if git does not trust the folder: an
    earlier build here may be of another commit."""
    described = _git(root, "describe", "--tags", "--match=v[0-9]*", "--dirty", "--abbrev=8")
    if described is not None:
        return of_description(described)
    commit = _git(root, "describe", "--always", "--exclude=*", "--dirty", "--abbrev=8")
    if commit is None:
        return UNKNOWN
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    count = _git(root, "rev-list", "--count", "HEAD") if shallow == "false" else "0"
    return f"{NEXT}.dev{count}+g{commit.replace('-', '.')}"


def _git(root: Path, *words: str) -> str | None:
    """Return the output of git, without the newline. None if git fails."""
    # The folders are named, because a git hook has GIT_DIR in its environment, which may be another
    # repository's.
    place = (f"--git-dir={root / '.git'}", f"--work-tree={root}")
    try:
        done = run(["git", *place, *words], capture_output=True, text=True, timeout=30)
    except (OSError, SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
