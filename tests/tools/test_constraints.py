"""Whoever installs with constraints.txt gets what the tests ran with: every package that this one and its extras bring is pinned."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TOOLS = frozenset({"setuptools"})
"""What an environment brings for itself."""


def brought(name: str, extras: frozenset[str], seen: dict[str, str]) -> None:
    """Names and versions of the installed packages that ``name`` needs, with theirs."""
    for text in distribution(name).requires or ():
        needs = Requirement(text)
        wanted = canonicalize_name(needs.name)
        applies = needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if not applies or wanted in seen:
            continue
        try:
            seen[wanted] = distribution(needs.name).version
        except PackageNotFoundError:
            continue  # of a platform, such as a GPU's, that this is not
        brought(needs.name, frozenset(needs.extras), seen)


def test_every_package_is_pinned_at_its_version() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    found: dict[str, str] = {}
    brought("megatron-llama", frozenset({"test", "hf", "wandb"}), found)
    assert len(found) > 60 and {"wandb", "opentelemetry-sdk", "torch"} <= found.keys()
    # A local build of torch calls itself 2.13.0+cpu.
    missing = {name: version for name, version in found.items() if name not in TOOLS and pinned.get(name) != version.split("+")[0]}
    assert missing == {}, "add these to constraints.txt, or install what it says"
