"""YAML that cannot take more than its file is long: bounded in depth, and in what its aliases stand
for together."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_llama.config.limits import OPTION_FILE_DEPTH, OPTION_FILE_VALUES


class BoundedLoader(yaml.SafeLoader):
    """The safe loader, which raises YAMLError with the line at which a bound is passed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, int] = {}
        """How many values a node stands for, by its identity."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose the next node, and count it."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before = self._count
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > OPTION_FILE_DEPTH:
            raise _refused(f"lists within each other, more than {OPTION_FILE_DEPTH}", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            self._count += 1
            self._sizes[id(node)] = self._count - before
        elif id(node) in self._sizes:
            self._count += self._sizes[id(node)]
        else:
            raise _refused("a value that contains itself", mark)
        if self._count > OPTION_FILE_VALUES:
            raise _refused(
                f"more than {OPTION_FILE_VALUES:,} values, those of aliases counted", mark
            )
        return node


def _refused(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, problem, mark)
