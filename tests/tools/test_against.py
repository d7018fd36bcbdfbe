"""Another checkout in the same process: its modules while asked for, ours before and behind."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_llama
from tools.overlap.against import _modules_of


def test_modules_of_another_checkout(tmp_path: Path) -> None:
    package = tmp_path / "megatron_llama"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'the other'\n")
    ours, path = sys.modules["megatron_llama"], list(sys.path)
    with _modules_of(tmp_path):
        import megatron_llama as theirs

        assert theirs.__version__ == "the other"
        assert Path(str(theirs.__file__)).is_relative_to(tmp_path)
    assert sys.modules["megatron_llama"] is ours is megatron_llama
    assert sys.path == path
