"""Where a path of the repository stands on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable

HOME = "README.md"
"""The page with which the site begins. It stands outside ``docs``, and its links begin there."""
EXAMPLES = "examples"
DOCS = "docs/"
CODE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
NAMED = re.compile(r"(?<!\[)`((?:docs|examples)/[\w./-]+|README\.md)`(?!\])")

SPAN = re.compile(r"`[^`]+`")
"""Repositories want a bar escaped in code in a table, and MkDocs shows the escape."""


def page_of(path: str) -> str | None:
    """Return the page, and perhaps the section, that shows a file or folder of the repository; None
    where no page does."""
    path = posixpath.normpath(path)
    if path == HOME:
        return "index.md"
    if path == EXAMPLES:
        return f"{EXAMPLES}/index.md"
    if path.startswith(DOCS):
        inside = path.removeprefix(DOCS)
        return inside if "." in posixpath.basename(inside) else f"{inside}/README.md"
    folder, name = posixpath.split(path)
    if folder.split("/")[0] != EXAMPLES:
        return None
    if "." not in name:
        return f"{path}.md" if name != "Dockerfile" else f"{folder}.md#dockerfile"
    stem = name.partition(".")[0].lower()
    return f"{EXAMPLES}/index.md#{stem}" if folder == EXAMPLES else f"{folder}.md#{stem}"


def source_of(page: str) -> str:
    """Return the file of the repository that a page was made of."""
    return HOME if page == "index.md" else DOCS + page


def rewritten(text: str, page: str, files: Iterable[str], complain: Callable[[str], None]) -> str:
    """Return the Markdown of ``page`` as MkDocs reads it. Links to files that stand outside
    ``docs`` become links to the pages that show them, and so do names of pages in code. ``files``
    are the pages of the site. ``complain`` is told of links that lead nowhere."""
    known = frozenset(files)
    source = source_of(page)
    base = posixpath.dirname(source)

    def relative(target: str, anchor: str) -> str:
        path, mark, section = target.partition("#")
        start = posixpath.dirname(page) or "."
        return posixpath.relpath(path, start) + (anchor or mark + section)

    def linked(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(base, found[1]))
        target = page_of(path)
        if target is None or target.partition("#")[0] not in known:
            complain(f"{source}: the link to {found[1]} leads to no page of the site")
            return found[0]
        return relative(target, found[2])

    def named(found: re.Match[str]) -> str:
        target = page_of(found[1])
        if target is None or target.partition("#")[0] not in known or target == page:
            return found[0]
        return f"[{found[0]}]({relative(target, '')})"

    lines = []
    fence = ""
    for line in text.split("\n"):
        mark = CODE.match(line)
        if fence or line.startswith("    "):
            fence = "" if mark is not None and mark[1].startswith(fence) else fence
            lines.append(line)
            continue
        if mark is not None:
            fence = mark[1]
            lines.append(line)
            continue
        if line.startswith("|"):
            line = SPAN.sub(lambda found: found[0].replace("\\|", "|"), line)
        lines.append(NAMED.sub(named, LINK.sub(linked, line)))
    return "\n".join(lines)
