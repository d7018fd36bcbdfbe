"""Pictures of real plans in the pages: what ``schedule --html`` and ``plan --html`` draw.

A page asks for one by a comment, which is invisible where Markdown is read without the site::

    <!-- picture Memory: What every rank holds.
    python -m megatron_llama plan --model llama2-7b --gpus 16
    -->

The first word is the beginning of the heading under which the command's page has the picture, or
``first`` for the first picture of the page. The caption follows the colon.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path

ASKED = re.compile(
    r"^<!-- picture ([\w ]+): (.+?)\n(python -m megatron_llama .+?)\n-->$", re.M | re.S
)
SECTION = re.compile(r"<h2>(.*?)</h2>")
WIDTH = re.compile(r'(<svg [^>]*?width="(\d+)")')
PICTURE = re.compile(
    r'(?P<key><p class="key">[^\n]*</p>\n)?(?:<div class="wide">)?(?P<drawing><svg .*?</svg>)', re.S
)
"""What the colours mean, where the page says it, and the drawing."""


def with_pictures(text: str, complain: Callable[[str], None]) -> str:
    """Return a page's Markdown with the pictures that it asks for. ``complain`` is told of commands
    that fail and of pages without such a picture."""

    def picture(found: re.Match[str]) -> str:
        section, caption, command = found[1], " ".join(found[2].split()), found[3]
        command = " ".join(command.replace("\\\n", " ").split())
        try:
            drawn = _drawn(command, section)
        except ValueError as error:
            complain(f"{command}: {error}")
            return ""
        words = escape(caption, quote=True)
        return (
            f'<figure class="picture"><div tabindex="0" role="region" aria-label="{words}">'
            f"{drawn}</div>"
            f"<figcaption>{words} <code>{escape(command)}</code></figcaption></figure>"
        )

    text = ASKED.sub(picture, text)
    if "<!-- picture" in text:
        complain("a comment begins with <!-- picture and has another form than this module says")
    return text


def _drawn(command: str, section: str) -> str:
    """The picture under the heading that begins with ``section``, with its key. Raises
    ValueError."""
    for heading, content in _sections(_page(command)):
        if section == "first" or heading.startswith(section):
            found = PICTURE.search(content)
            if found is not None:
                whole = (found["key"] or "") + found["drawing"]
                return WIDTH.sub(r'\1 style="--width:\2px"', whole.replace("\n", ""))
    raise ValueError(f"the page of this command has no picture under a heading {section}")


def _sections(page: str) -> Iterator[tuple[str, str]]:
    first, *rest = SECTION.split(page)
    yield "", first
    yield from zip(rest[::2], rest[1::2], strict=True)


@cache
def _page(command: str) -> str:
    """The file that the command writes for ``--html``. Raises ValueError."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "page.html"
        done = subprocess.run(
            [sys.executable, *words[1:], "--html", str(target)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ValueError(done.stderr.strip())
        return target.read_text(encoding="utf-8")
