"""The documentation as a site, built by its command and read in a real browser. Run by tests/site.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote
from urllib.request import urlopen

import pytest
from markdown_it import MarkdownIt

from tests.launcher import ROOT, TIMEOUT, free_port
from tests.site.browser import Browser, browser

pytestmark = pytest.mark.site
EMPTY = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Read(HTMLParser):
    """Links, structure and code of a page."""

    def __init__(self, text: str, *, whole: bool = True) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: list[str] = []
        self.counts: dict[str, int] = {}
        self._article = 0 if whole else -1
        """Elements open inside the article; -1 outside of it."""
        self._figures = 0
        self.code: list[str] = []
        """What stands in code inside of lines."""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.targets += [value for name in ("href", "src") if (value := found.get(name)) is not None]
        self.names += [value for name in ("id", "name") if (value := found.get(name)) is not None]
        self._figures += tag == "figure"
        if self._article >= 0 and not self._figures and tag in ("h1", "h2", "h3", "h4", "li", "tr", "td", "pre", "strong", "em"):
            self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag in ("pre", "code") and not self._inside and not self._figures and self._article >= 0:
            self._inside = tag
            self.code += [""] if tag == "code" else []
        if tag == "article" and "md-typeset" in str(found.get("class")):
            self._article = 0

    def handle_data(self, data: str) -> None:
        if self._inside == "code":
            self.code[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""
            self.code[-1:] = [" ".join(text.split()) for text in self.code[-1:]]
        self._figures -= tag == "figure"
        if tag == "article":
            self._article = -1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(["bash", "tools/site.sh", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"open {folder}/index.html\n")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> list[str]:
    """Every page by its path."""
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(found) > 35 and {"index.html", "options.html", "guide/index.html", "examples/launch.html"} <= set(found)
    return found


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site on a server of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    """The browser."""
    with browser() as found:
        yield found


def test_every_link_leads_somewhere(site: Path, pages: list[str]) -> None:
    read = {page: Read((site / page).read_text()) for page in pages}
    broken = []
    for page, found in read.items():
        for target in found.targets:
            path, _, anchor = unquote(target).partition("#")
            if path.startswith(("https://", "data:")):
                continue
            place = (site / page).parent.joinpath(path).resolve() if path else site / page
            name = str(place.relative_to(site))
            if not place.is_file() or (anchor and anchor not in read[name].names):
                broken.append((page, target))
    assert broken == []
    assert sum(len(found.targets) for found in read.values()) > 3000


def test_pages_have_the_structure_that_repositories_show(site: Path) -> None:
    """MkDocs reads another Markdown than repositories do: what is a list, a table or code in one is so in the other."""
    markdown = MarkdownIt("commonmark").enable("table")
    wrong = {}
    for source in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = "index.html" if source.name == "README.md" else f"{source.stem}.html"
        built = site / ("index.html" if source.parent == ROOT else source.relative_to(ROOT / "docs").with_name(name))
        expected, found = Read(markdown.render(source.read_text())), Read(built.read_text(), whole=False)
        if found.counts != expected.counts or found.code != expected.code:
            tags = [tag for tag in found.counts | expected.counts if found.counts.get(tag) != expected.counts.get(tag)]
            code = [pair for pair in zip(found.code, expected.code, strict=False) if pair[0] != pair[1]]
            wrong[str(source.relative_to(ROOT))] = (tags, code[:3], len(found.code), len(expected.code))
    assert wrong == {}


READABLE = """
new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))).then(() => {
  const quiet = document.createElement("style");
  quiet.textContent = "*, *::before, *::after { transition: none !important; animation: none !important }";
  document.head.append(quiet);
  const parts = (text) => {
    const found = /^rgba?\\(([\\d.]+), ([\\d.]+), ([\\d.]+)(?:, ([\\d.]+))?\\)$/.exec(text);
    if (!found) throw new Error("colour " + text);
    return [+found[1], +found[2], +found[3], found[4] === undefined ? 1 : +found[4]];
  };
  const over = (top, under) => [0, 1, 2].map((place) => top[3] * top[place] + (1 - top[3]) * under[place]).concat(1);
  const light = (colour) => {
    const linear = colour.slice(0, 3).map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    if (!element) return [255, 255, 255, 1];
    const own = parts(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const boxes = new Map();
  for (const picture of document.querySelectorAll("article svg")) {
    const before = [];
    for (const one of picture.querySelectorAll("rect, text")) {
      if (one.tagName === "text") boxes.set(one, before.length);
      else before.push([one, ...["x", "y", "width", "height"].map((name) => +one.getAttribute(name))]);
    }
    boxes.set(picture, before);
  }
  const inPicture = (text) => {
    const picture = text.closest("svg");
    const box = text.getBBox();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    const under = boxes.get(picture).slice(0, boxes.get(text))
      .findLast((rect) => rect[1] <= x && x <= rect[1] + rect[3] && rect[2] <= y && y <= rect[2] + rect[4]);
    const paper = ground(picture);
    const colour = under ? over(parts(getComputedStyle(under[0]).fill), paper) : paper;
    return [parts(getComputedStyle(text).fill), colour];
  };
  const found = new Map();
  let texts = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const words = walk.currentNode.textContent.trim();
    if (!words || element.closest("script, style, noscript, title") || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const [ink, paper] = element.closest("svg") ? inPicture(element) : [parts(getComputedStyle(element).color), ground(element)];
    texts += 1;
    const value = contrast(over(ink, paper), paper);
    const kind = element.tagName + "." + (element.getAttribute("class") || "");
    if (value < 4.5 && !(found.get(kind)?.[0] <= value)) found.set(kind, [Math.round(value * 100) / 100, words.slice(0, 40)]);
  }
  const room = document.documentElement.clientWidth;
  const wide = document.documentElement.scrollWidth > innerWidth ? [document.documentElement.scrollWidth, innerWidth] : [];
  const scrolls = (element) => element && (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const out = [...document.querySelectorAll("article *")]
    .filter((element) => element.getBoundingClientRect().right > room + 1 && !scrolls(element.parentElement) && element.checkVisibility())
    .map((element) => element.tagName + " " + element.textContent.slice(0, 40));
  return { texts, pale: [...found], wide, out: out.slice(0, 5), ground: ground(document.body) };
})
"""
"""What a page is in this size and scheme: its texts, those that stand out too little from what is behind them, and what is wider than the
screen and does not scroll by itself."""


@pytest.mark.parametrize("width", [375, 1280])
def test_every_page_can_be_read(width: int, address: str, pages: list[str], shown: Browser) -> None:
    """In the light and in the dark. And it asks no other machine for anything."""
    wrong = {}
    texts = 0
    shown.size(width)
    for page in pages:
        shown.scheme("light")
        shown.open(f"{address}/{page}")
        for scheme in ("light", "dark"):
            shown.scheme(scheme)
            found = shown.run(READABLE)
            dark = max(found["ground"][:3]) < 100
            texts += found["texts"]
            if dark != (scheme == "dark") or found["pale"] or found["wide"] or found["out"]:
                wrong[f"{page}, {scheme}"] = found
        outside = [url for url in shown.requests() if not url.startswith((f"{address}/", "data:"))]
        if outside or shown.complaints():
            wrong[page] = {"requests": outside, "complaints": shown.complaints()}
    assert wrong == {}
    assert texts > 20_000


SEARCH = """
new Promise((resolve) => {
  const input = document.querySelector("[data-md-component=search-query]");
  const items = () => [...document.querySelectorAll(".md-search-result__item a")].map((link) => [link.getAttribute("href"), link.textContent]);
  new MutationObserver(() => items().length && resolve(items())).observe(document.querySelector(".md-search"), { childList: true, subtree: true });
  input.focus();
  input.value = %r;
  input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  input.dispatchEvent(new Event("input", { bubbles: true }));
})
"""


OPEN = """
new Promise((resolve) => {
  const locked = () => document.body.hasAttribute("data-md-scrolllock") && resolve();
  new MutationObserver(locked).observe(document.body, { attributes: true });
  document.querySelector("[data-md-toggle=search]").click();
})
"""
"""The panel covers a small screen and slides in; then the theme locks the page behind it, of which nothing is beside it any more."""


@pytest.mark.parametrize(("place", "word", "page"), [("files", "zenflow", "offload.html"), ("server", "resume", "guide/05-resume.html")])
def test_the_search_finds_a_word(place: str, word: str, page: str, site: Path, address: str, shown: Browser) -> None:
    """From a server and from files, where browsers start no workers."""
    shown.size(375)
    shown.scheme("light")
    base = f"file://{site}" if place == "files" else address
    shown.open(f"{base}/guide/03-pretrain.html")
    shown.run(OPEN)
    found = shown.run(SEARCH % word)
    assert any(page in link and word in text.lower() for link, text in found), found
    for scheme in ("light", "dark"):
        shown.scheme(scheme)
        read = shown.run(READABLE)
        assert read["pale"] == [] and read["wide"] == [], read
    assert not shown.complaints() and all(url.startswith((base, "data:")) for url in shown.requests())


def test_pages_have_the_pictures_that_they_ask_for(site: Path) -> None:
    """Schedules, the timeline of a step, its time and its memory, as the commands draw them, with these commands below them."""
    asked = {path.stem: path.read_text().count("<!-- picture ") for path in (ROOT / "docs").rglob("*.md") if path.stem != "README"}
    drawn = {path.stem: path.read_text().count('<figure class="picture">') for path in site.rglob("*.html") if path.stem in asked}
    assert drawn == asked and sum(asked.values()) > 9
    text = (site / "planner.html").read_text()
    assert "pp rank 7" in text and "usable of a h100" in text and "<title>forward 0, stage 0: " in text
    figures = [figure for page in site.rglob("*.html") for figure in re.findall(r'<figure class="picture">.*?</figure>', page.read_text())]
    bars = [set(re.findall(r'<rect class="b" fill="(#\w+)"', figure)) for figure in figures]
    keys = [set(re.findall(r'<i style="background:(#\w+)"', figure)) for figure in figures]
    assert sum(map(bool, bars)) > 4 and all(used <= explained for used, explained in zip(bars, keys, strict=True)), "each colour has a word"


FAULTS = (
    ("engine.md", "[gone](gone.md)", "'gone.md'"),
    ("engine.md", "[gone](offload.md#gone)", "#gone"),
    ("faults.md", "[gone](../tools/gone.py)", "docs/faults.md: the link to ../tools/gone.py leads to no page of the site"),
    (
        "lora.md",
        "<!-- picture first: None.\npython -m megatron_llama schedule --pipeline-schedule gone\n-->",
        "--pipeline-schedule: got gone",
    ),
    ("sft.md", "<!-- picture none\n-->", "has another form"),
    ("new.md", "# New", "not included in the"),
)
"""A page, what is written at its end, and what is said of that."""


def test_faults_end_the_build(site: Path, tmp_path: Path) -> None:
    for name in ("docs", "examples", "tools/docs_site"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "megatron_llama").symlink_to(ROOT / "megatron_llama")
    shutil.copy(ROOT / "README.md", tmp_path)
    for page, line, _ in FAULTS:
        with (tmp_path / "docs" / page).open("a") as file:
            file.write(f"\n{line}\n")
    command = [
        str(ROOT / ".venv" / "site" / "bin" / "python"),
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        "tools/docs_site/mkdocs.yml",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode != 0, done.stderr
    assert [said for _, _, said in FAULTS if said not in done.stderr] == [], done.stderr


def test_no_folder_of_somebody_else_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    for target in (tmp_path, tmp_path / "thesis.txt", "--folder"):
        done = subprocess.run(["bash", "tools/site.sh", str(target)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"error: tools/site.sh: got {target}, expected a"), done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "words"


def test_the_site_is_served_while_it_is_written(site: Path) -> None:
    """``site``: the environment is there, and nothing is installed meanwhile."""
    address = f"127.0.0.1:{free_port()}"
    serving = subprocess.Popen(
        ["bash", "tools/site.sh", "--serve"], cwd=ROOT, env={**os.environ, "SITE_ADDRESS": address}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert serving.stderr is not None
        assert any(f"Serving on http://{address}/" in line for line in serving.stderr), "it has ended"
        with urlopen(f"http://{address}/planner.html") as page:
            assert b"Planning a cluster" in page.read()
    finally:
        serving.terminate()
        serving.communicate(timeout=TIMEOUT)
