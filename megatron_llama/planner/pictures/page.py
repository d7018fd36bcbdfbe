"""Pages that need only a browser: one HTML file without scripts, in the browser's light or dark
colours. ``plan``, ``schedule``, ``prove`` and ``report`` build their pages from these parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

BARS = """
rect.b { stroke: #fff; stroke-width: .4 }
text.n { pointer-events: none }
rect.r { fill: #f7f8fa }
line.g { stroke: #e3e6eb }
"""
"""Style of the CSS classes of drawings: bars and their texts, the ground of a row, and the lines of
a grid. A drawing in a file of its own uses this style unchanged."""
STYLE = f"""
:root {{ color-scheme: light dark; --page: light-dark(#fff, #14181f);
  --soft: light-dark(#5b6472, #9aa4b2); --rule: light-dark(#e3e6eb, #333a45);
  --good: light-dark(#1c7c54, #4cc38a); --bad: light-dark(#b3362f, #ff7b72);
  --bar: light-dark(#3168be, #6ea8fe) }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 1200px;
  padding: 0 16px; background: var(--page); color: light-dark(#222831, #e4e8ee) }}
h1 {{ font-size: 22px; overflow-wrap: anywhere }} h2 {{ font-size: 18px; margin-top: 36px }}
h3 {{ font-size: 15px }}
p {{ max-width: 80em }}
.good {{ color: var(--good); font-weight: 600 }} .bad {{ color: var(--bad); font-weight: 600 }}
.soft {{ color: var(--soft) }}
.wide {{ overflow-x: auto }} .wide svg {{ max-width: none }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: 4px 12px 4px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule) }}
th {{ font-weight: 600 }} th.n, td.n {{ text-align: right }}
th, td.k, td.n, td.good, td.bad {{ white-space: nowrap }}
td.s {{ min-width: 15em; overflow-wrap: anywhere }}
td code {{ overflow-wrap: normal }} td.k code {{ white-space: nowrap }}
code, pre {{ font: 13px ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }}
svg {{ display: block; margin: 6px 0; font: 11px system-ui, sans-serif; max-width: 100%;
  height: auto; fill: currentColor }}
{BARS.strip()}
rect.b {{ stroke: var(--page) }}
rect.r {{ fill: light-dark(#f7f8fa, #1c222b) }} line.g {{ stroke: var(--rule) }}
rect.ok {{ fill: var(--bar) }} rect.no {{ fill: var(--bad) }} text.s {{ fill: var(--soft) }}
@media (max-width: 600px) {{ th, td.k, td.k code {{ white-space: normal }}
  td.k {{ min-width: 7.5em }} td.s {{ min-width: 8em }} }}
.key span {{ display: inline-block; margin-right: 14px }}
.key i {{ display: inline-block; width: 11px; height: 11px; margin-right: 5px }}
"""


def page(title: str, parts: Iterable[str], *, style: str = "") -> str:
    """Return a whole HTML file. ``parts`` come from ``heading``, ``table`` and the other functions;
    ``style`` is additional CSS of this page."""
    name = escape(title)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title><style>{STYLE}{style}</style></head>",
            f"<body><h1>{name}</h1>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """Return preformatted text, for readers to copy."""
    return f"<pre>{escape(text)}</pre>"


def details(summary: str, parts: Iterable[str]) -> str:
    """Return parts in a section that the reader can open."""
    return "\n".join([f"<details><summary>{escape(summary)}</summary>", *parts, "</details>"])


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[int] = (0,),
    sentences: Sequence[int] = (),
) -> str:
    """Return a table. ``words`` are the columns of short texts, ``sentences`` the columns whose
    lines may break. All other columns are numbers."""
    kinds = [
        "k" if place in words else "s" if place in sentences else "n" for place in range(len(head))
    ]
    return html_table(
        [
            (escape(cell), "n" if kind == "n" else "")
            for cell, kind in zip(head, kinds, strict=True)
        ],
        [[(escape(cell), kind) for cell, kind in zip(row, kinds, strict=True)] for row in rows],
    )


Cell = tuple[str, str]
"""HTML, and the CSS class of the cell."""


def html_table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table of HTML, which scrolls if it is wider than the page. If a row is shorter than
    the head, its last cell extends to the end."""
    top = "".join(_cell("th", cell) for cell in head)
    body = (
        "".join(
            _cell("td", cell, 1 if place < len(row) else len(head) - len(row) + 1)
            for place, cell in enumerate(row, 1)
        )
        for row in rows
    )
    written = "\n".join(f"<tr>{row}</tr>" for row in body)
    return f'<div class="wide"><table><tr>{top}</tr>\n{written}</table></div>'


def _cell(tag: str, cell: Cell, columns: int = 1) -> str:
    text, kind = cell
    shown = f' class="{kind}"' if kind else ""
    wide = f' colspan="{columns}"' if columns > 1 else ""
    return f"<{tag}{shown}{wide}>{text}</{tag}>"


def key(names: Iterable[tuple[str, str]]) -> str:
    """Return a key of colours. ``names`` are (words, colour)."""
    entries = (
        f'<span><i style="background:{colour}"></i>{escape(words)}</span>'
        for words, colour in names
    )
    return f'<p class="key">{"".join(entries)}</p>'
