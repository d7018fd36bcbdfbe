"""YAML with bounds on its depth and on the number of values for which its aliases stand, so that a
short file cannot take much memory."""

from __future__ import annotations

from typing import Any

from megatron_llama.config.limits import OPTION_FILE_DEPTH, OPTION_FILE_VALUES


def bounded_loader(text: str) -> Any:
    """Return a safe loader of YAML that raises YAMLError, with the line, where a bound is passed.

    ``--help`` does not wait for yaml, so it is imported here."""
    import yaml

    def refused(problem: str, mark: Any) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, problem, mark)

    class BoundedLoader(yaml.SafeLoader):
        depth = 0
        count = 0

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.sizes: dict[int, int] = {}
            """The number of values for which a node stands, by the node's identity."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Compose the next node, and count it."""
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            before = self.count
            is_alias = self.check_event(yaml.AliasEvent)
            self.depth += 1
            if self.depth > OPTION_FILE_DEPTH:
                raise refused(f"lists within each other, more than {OPTION_FILE_DEPTH}", mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            if not is_alias:
                self.count += 1
                self.sizes[id(node)] = self.count - before
            elif id(node) in self.sizes:
                self.count += self.sizes[id(node)]
            else:
                raise refused("a value that contains itself", mark)
            if self.count > OPTION_FILE_VALUES:
                most = f"more than {OPTION_FILE_VALUES:,} values"
                raise refused(f"{most}, those of aliases counted", mark)
            return node

    return BoundedLoader(text)
