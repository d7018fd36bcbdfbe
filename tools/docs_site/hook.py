"""What MkDocs calls while it builds the site: first page, examples, links, pictures."""

from __future__ import annotations

import logging
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

from tools.docs_site.examples import example_pages
from tools.docs_site.links import HOME, rewritten
from tools.docs_site.pictures import with_pictures

ROOT = Path(__file__).parents[2]
ASSETS = Path(__file__).parent / "assets"
CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.S)
WORD = re.compile(r"(?<=[\s>])[^<>\s]{1,28}(?=[\s<])")
TABLE = re.compile(r"<table.*?</table>", re.S)
ROW = re.compile(r"<tr>(?:(?!</?tr>).)*?<td.*?</tr>", re.S)
TAG = re.compile(r"<[^>]+>")
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.S)
PROSE = 40
"""Letters that the last cells of a table have at least, on average, if they are prose."""
SHORT = 16
"""Letters at most of a cell that stands on one line."""
LONG = 60
"""Letters at least of a cell that needs a wide column."""
UNSENT = ("404.html", "sitemap.xml", "sitemap.xml.gz")
"""What MkDocs makes for the address of a site, which this one does not have."""
LOG = logging.getLogger("mkdocs.hooks.site")
"""With ``--strict`` a warning here ends the build."""


def on_config(config: Any) -> Any:
    """Name sections as repositories do, so that a link to one works there and here."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not stand in ``docs``: README.md, and the examples."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / HOME)))
    for path, text in example_pages(ROOT / "examples"):
        files.append(File.generated(config, path, content=text))
    for asset in sorted(ASSETS.iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", abs_src_path=str(asset)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links as the site has them, and with its pictures."""
    path = page.file.src_uri
    if path == "index.md":
        page.meta["hide"] = ["navigation"]  # it is alone in its tab
    if path.startswith("examples/"):
        return markdown  # its links are those of the site
    pages = (file.src_uri for file in files)
    return with_pictures(rewritten(markdown, path, pages, LOG.warning), LOG.warning)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with short words in code that no line may break: browsers would break
    ``--config`` behind its first hyphen, and any word where the column of a table is narrow."""

    def unbroken(found: re.Match[str]) -> str:
        text = found[0]
        whole = text.startswith("<pre")
        return text if whole else WORD.sub(r'<span class="word">\g<0></span>', text)

    return TABLE.sub(_laid_out, CODE.sub(unbroken, html))


def _laid_out(table: re.Match[str]) -> str:
    """Return a table whose cells say how long they are, and say the head of their column if its
    last column is prose: on a narrow screen such a table has its cells one below the other
    (``assets/site.css``)."""
    heads = [unescape(TAG.sub("", head)) for head in HEAD.findall(table[0])]
    rows = [
        [len(unescape(TAG.sub("", cell[1]))) for cell in CELL.finditer(row)]
        for row in ROW.findall(table[0])
    ]
    is_prose = sum(row[-1] for row in rows) >= PROSE * len(rows)

    def row_of(row: re.Match[str]) -> str:
        names = iter(heads)

        def cell_of(cell: re.Match[str]) -> str:
            letters = len(unescape(TAG.sub("", cell[1])))
            kind = "short" if letters <= SHORT else "long" if letters >= LONG else ""
            head = f' data-head="{escape(next(names))}"' if is_prose else ""
            return cell[0].replace("<td", f'<td class="{kind}"{head}' if kind else f"<td{head}", 1)

        return CELL.sub(cell_of, row[0])

    text = ROW.sub(row_of, table[0])
    return text.replace("<table", '<table data-prose=""', 1) if is_prose else text


def on_post_build(config: Any) -> None:
    """Remove what holds for a site at a known address only."""
    for name in UNSENT:
        (Path(config.site_dir) / name).unlink(missing_ok=True)
