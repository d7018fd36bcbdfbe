"""lm-evaluation-harness with the model of all ranks: an adapter, and the tasks that it can run.

lm-evaluation-harness runs on rank 0 alone and asks for log-likelihoods, which all ranks compute.
Tokens, prefixes, windows and truncation are those of its own model ``hf``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megatron_llama.data.tokenizer.base import beyond_vocabulary
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.errors import DataError, counted, describe, listing
from megatron_llama.train.setup.scoring import Ask, Request

SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
"""The kinds of requests that tasks may make."""


@dataclass(frozen=True)
class TaskOptions:
    """The tasks for the model."""

    tasks: tuple[str, ...]
    """Names of tasks, or YAML files."""
    num_fewshot: int | None
    """Examples in front of each question; None: as each task says."""
    limit: float
    """Number of questions of each task; below 1, a share of them; 0: all."""


@dataclass(frozen=True)
class Report:
    """The results of some tasks."""

    text: str
    """A table, for people."""
    json: bytes
    """All results, in the format of lm-evaluation-harness."""


def report(
    ask: Ask,
    options: TaskOptions,
    tokenizer: HFTokenizer,
    *,
    longest: int,
    vocab_size: int,
    info: Mapping[str, Any],
) -> Report:
    """Run tasks with the model whose scores ``ask`` returns. The other arguments are those of
    ``ParallelModel``. Raises DataError for a task that cannot be read, or that the model cannot
    run."""
    model = ParallelModel(ask, tokenizer, longest=longest, vocab_size=vocab_size, info=info)
    limit = options.limit if options.limit < 1 else int(options.limit)
    results: dict[str, Any] = simple_evaluate(
        model,
        tasks=list(options.tasks),
        num_fewshot=options.num_fewshot,
        limit=limit or None,
        task_manager=_ScoredTasks(
            options.num_fewshot or 0, include_defaults=not all(map(_stands_alone, options.tasks))
        ),
        log_samples=False,
    )
    lines = list(_table(results))
    if model.shortened:
        lines.append(
            f"note: {counted(model.shortened, 'request')} lost the beginning: the model reads "
            f"{longest} tokens (--seq-length)"
        )
    content = json.dumps(results, indent=2, default=utils.handle_non_serializable) + "\n"
    return Report("\n".join(lines), content.encode())


def _stands_alone(task: str) -> bool:
    """Whether a task is a file that names no other tasks. To find a name, lm-evaluation-harness
    reads all its 14,000 files, which takes half a minute."""
    path = Path(task)
    return path.is_file() and not re.search(rb"^group\s*:", path.read_bytes(), re.MULTILINE)


def _table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table with a row for each task, metric and filter."""
    rows = [("task", "n-shot", "metric", "value", "stderr")]
    for name, scores in results["results"].items():
        shots = str(results.get("n-shot", {}).get(name, ""))
        for key, value in scores.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            shown = metric if filtered == "none" else f"{metric} ({filtered})"
            error = scores.get(f"{metric}_stderr,{filtered}")
            numbers = (_number(value), _number(error) if isinstance(error, float) else "")
            rows.append((str(scores.get("alias", name)), shots, shown, *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f" {'  '.join(cells)}".rstrip()


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class ParallelModel(TemplateLM):
    """The model of all ranks, for lm-evaluation-harness."""

    def __init__(
        self,
        ask: Ask,
        tokenizer: HFTokenizer,
        *,
        longest: int,
        vocab_size: int,
        info: Mapping[str, Any],
    ) -> None:
        """``longest``: tokens that the model reads at most; longer requests lose their beginning.
        ``info`` is for the results. Raises DataError for a tokenizer without begin and end
        token."""
        super().__init__()
        self._ask = ask
        # The name ``tokenizer`` would mean one of transformers to the base class.
        self._tokenizer = tokenizer
        self._longest = longest
        self._vocab_size = vocab_size
        self._info = info
        self.shortened = 0
        """Number of requests that were longer."""
        prefix = tokenizer.prefix_id
        if prefix is None:
            do = "use another tokenizer"
            expected = "one, behind which the first token of a text is scored"
            raise DataError(tokenizer.path, got="no begin or end token", expected=expected, do=do)
        self._prefix = prefix
        self._prefix_text = tokenizer.token(prefix) or ""

    @property
    def eot_token_id(self) -> int | None:
        """The end token."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without a context."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self._longest

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts about the model for the results."""
        return dict(self._info)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Encode a text, by default with the tokenizer's special tokens, unless it already begins
        with the begin token."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        tokenizer = self._tokenizer
        return tokenizer.encode_prompt(string) if add_special_tokens else tokenizer.encode(string)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of whole texts, in windows that do not overlap."""
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(text), self._prefix, self._longest, context_len=1
            )
            own = [(("", text), *utils.make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Raise DataError: text is generated in one process only."""
        names = sorted({str(request.task_name) for request in requests})
        raise DataError(_not_scored(", ".join(names), "generate_until"))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        asked = []
        problems = []
        for (context, continuation), before, scored in requests:
            where = f"--tasks: a request that ends with {(context + continuation)[-40:]!r}"
            problem = self._problem(where, before, scored)
            if problem is not None:
                problems.append(problem)
                continue
            tokens = (*before, *scored)[-(self._longest + 1) :]
            self.shortened += len(tokens) < len(before) + len(scored)
            asked.append(Request(tokens, len(scored)))
        if problems:
            shown = problems[:_SHOWN]
            more = len(problems) - len(shown)
            shown += [f"and {counted(more, 'other one')}"] * bool(more)
            raise DataError(listing("These requests cannot be scored:", shown))
        return [(score.logprob, score.greedy) for score in self._ask(asked)]

    def _problem(self, where: str, before: Sequence[int], scored: Sequence[int]) -> str | None:
        """Return why a request cannot be scored; None if it can."""
        if not before or not scored:
            got = "no token" if not scored else "no token before it"
            do = "correct the task: what is scored, and what is before it, need text"
            return describe(where, got=got, expected="one at least", do=do)
        if len(scored) > self._longest:
            got = f"{counted(len(scored), 'token')} to score"
            expected = f"at most {self._longest}"
            do = "raise --seq-length, up to what the model has been trained for"
            return describe(where, got=got, expected=expected, do=do)
        do = "give the tokenizer of the model (--tokenizer-model)"
        return beyond_vocabulary(
            where, (*before, *scored), self._vocab_size, self._tokenizer, do=do
        )


_SHOWN = 5


def _not_scored(name: str, kind: str) -> str:
    do = "leave it out here; export the model, and run it with lm_eval --model hf"
    expected = f"one that asks for log-likelihoods ({', '.join(SCORED)})"
    got = f"the task {name}, whose output_type is {kind}"
    return describe("--tasks", got=got, expected=expected, do=do)


class _ScoredTasks(TaskManager):
    """A manager that refuses tasks that ask for anything but log-likelihoods, or have fewer
    examples than are wanted in front of a question."""

    def __init__(self, num_fewshot: int, **options: Any) -> None:
        super().__init__(**options)
        self._num_fewshot = num_fewshot

    def load(self, task_list: Any) -> Any:
        """Return the tasks, with their data. Raises DataError."""
        try:
            loaded = super().load(task_list)
        except Exception as error:
            # Any error of a task's file, its code, its data or the network.
            do = (
                "check it (lm_eval ls tasks lists the names); without a network, give the YAML "
                "file of a task whose data is on this machine"
            )
            got = f"{type(error).__name__}: {error}"
            names = ", ".join(map(str, task_list))
            expected = "tasks of lm-evaluation-harness, and their data"
            raise DataError(f"--tasks {names}", got=got, expected=expected, do=do) from error
        kinds = {name: task.OUTPUT_TYPE for name, task in loaded["tasks"].items()}
        refused = [_not_scored(name, kind) for name, kind in kinds.items() if kind not in SCORED]
        if refused:
            raise DataError(listing("These tasks cannot be run:", refused))
        for name, task in loaded["tasks"].items():
            most = _examples(task) if self._num_fewshot else 0
            # A number that a task fixes at 0 stays 0.
            if most < self._num_fewshot and task.config.num_fewshot != 0:
                do = "give fewer"
                expected = f"at most {most}, as many examples as the task {name} has"
                raise DataError("--num-fewshot", got=self._num_fewshot, expected=expected, do=do)
        return loaded


def _examples(task: Any) -> int:
    """Return the number of examples that a task can put in front of a question, without the
    question itself."""
    examples = sum(1 for _ in task.fewshot_docs())
    split = getattr(getattr(task, "fewshot_cfg", None), "split", None)
    return examples - (split is not None and split == task.config.test_split)
