"""Pages that show the files of ``examples``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

LANGUAGES: Mapping[str, str] = MappingProxyType(
    {
        ".sh": "bash",
        ".sbatch": "bash",
        ".yaml": "yaml",
        ".yml": "yaml",
        ".py": "python",
        ".toml": "toml",
    }
)
COMMENT = re.compile(r"# (?!!)(.+)")


def example_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of a page for ``examples`` and for each folder in it. A
    section has the files that share a name, such as a recipe and the script that starts it."""
    folders = sorted(path for path in folder.rglob("*") if path.is_dir() and _files(path))
    inner = "".join(f"- [{path.name}]({path.name}.md)\n" for path in folders)
    intro = (
        "Recipes in YAML, each with the script that starts it. The folders have pages of "
        f"their own:\n\n{inner}"
    )
    yield "examples/index.md", _page("Recipes", intro, folder, folder)
    for path in folders:
        name = path.relative_to(folder)
        intro = f"The files of `examples/{name}/`."
        title = path.name.replace("_", " ").capitalize()
        yield f"examples/{name}.md", _page(title, intro, path, folder)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_file() and path.suffix not in (".pyc", ".md")
    )


def _page(title: str, intro: str, folder: Path, top: Path) -> str:
    groups: dict[str, list[Path]] = {}
    for path in _files(folder):
        groups.setdefault(path.name.partition(".")[0], []).append(path)
    parts = [f"# {title}\n", f"{intro}\n"]
    for stem, paths in groups.items():
        parts.append(f"## {stem}\n")
        said = next(filter(None, map(_said, paths)), "")
        parts += [f"{said}\n"] if said else []
        for path in sorted(paths, key=lambda path: path.suffix != ".yaml"):
            text = path.read_text(encoding="utf-8").rstrip("\n")
            language = LANGUAGES.get(path.suffix, "docker" if path.name == "Dockerfile" else "text")
            name = path.relative_to(top.parent)
            parts.append(f'````{language} title="{name}"\n{text}\n````\n')
    return "\n".join(parts)


def _said(path: Path) -> str:
    """The first paragraph of a file's comment, up to the command that it shows."""
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8").removeprefix('"""').partition("\n\n")[0]
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#!"):
            continue
        found = COMMENT.fullmatch(line)
        if found is None or found[1].startswith(" "):
            break
        words.append(found[1])
    return " ".join(words).partition(". ")[0].rstrip(".:") + "." if words else ""
