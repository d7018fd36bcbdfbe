"""``data preview|check|stats``: the result of reading files of examples by ``sft`` or ``align``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_llama.config import parse
from megatron_llama.config.parse import Parsed
from megatron_llama.config.parts import completed, part_of
from megatron_llama.errors import DataError, counted, describe
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.sft.formats import Example, Passage
from megatron_llama.tune.sft.option_problems import ignored_problems, refuse
from megatron_llama.tune.sft.sft_config import DataToolConfig, SFTConfig

if TYPE_CHECKING:
    from megatron_llama.tune.sft.chat import ChatTokenizer
    from megatron_llama.tune.sft.dataset import Examples
    from megatron_llama.tune.sft.run import FilledSamples

SECTIONS = (
    DataToolConfig,
    SFTConfig,
    part_of(
        AlignConfig,
        "Pairs for align, in the place of conversations for sft. Without these options the first "
        "record of the files says which they are.",
        "method",
        "preference_format",
    ),
)
_GREEN = "\x1b[1;32m"
_PLAIN = "\x1b[0m"


def data(parsed: Parsed) -> int:
    """Run ``action``. Return the exit status: 1 if there are examples at which a run would stop."""
    tool = parsed.get(DataToolConfig)
    options = parsed.get(SFTConfig)
    wrong = []
    if not options.train_data:
        wrong.append(
            describe(
                "--train-data",
                got="nothing",
                expected="files of examples",
                do=f"give data {tool.action} FILE",
            )
        )
    if tool.tokenizer_model is None:
        expected = "the tokenizer of the model"
        do = "give --tokenizer-model FOLDER"
        wrong.append(describe("--tokenizer-model", got="nothing", expected=expected, do=do))
    for flag, value in (("--example", tool.example), ("--seq-length", tool.seq_length)):
        if value < 1:
            wrong.append(describe(flag, got=value, expected="1 or more", do="correct it"))
    if tool.action == "stats" and not tool.output.endswith((".html", ".htm")):
        wrong.append(
            describe(
                "--output",
                got=tool.output,
                expected="a name that ends in .html",
                do="correct it: stats writes a page",
            )
        )
    refuse([*wrong, *ignored_problems(options)])
    from megatron_llama.data.tokenizer.load import load_tokenizer
    from megatron_llama.tune.sft.chat import ChatTokenizer
    from megatron_llama.tune.sft.inputs import loss_parts
    from megatron_llama.tune.sft.records import example_files

    assert tool.tokenizer_model is not None
    files = example_files([*options.train_data, *options.valid_data])
    tokenizer = ChatTokenizer(load_tokenizer(tool.tokenizer_model), options.chat_template)
    align = _align(parsed, files)
    counts = (
        loss_parts(tokenizer.template.marks_answers, options)
        if align is None
        else f"completions (pairs for align --method {align.method})"
    )
    print(f"chat template: {tokenizer.template.name}; in the loss: {counts}")
    for warning in tokenizer.require_end():
        print(warning, file=sys.stderr)
    if align is not None:
        if tool.action == "preview":
            return _preview_pair(files, tokenizer, tool, options, align)
        return _check_pairs(files, tokenizer, tool, options, align)
    if tool.action == "preview":
        return _preview(files, tokenizer, tool, options)
    return _check(files, tokenizer, tool, options)


def _align(parsed: Parsed, files: Sequence[Path]) -> AlignConfig | None:
    """Return the options of align for the files; None if they are examples for sft. Raises
    ConfigError for options of sft that align does not have."""
    from megatron_llama.tune.preference.pairs import is_preference
    from megatron_llama.tune.sft.records import records

    align = completed(AlignConfig, parsed)
    of_sft = [name for name in ("data_format", "loss_on") if name in parsed.explicit]
    if parsed.explicit & {"method", "preference_format"}:
        refuse(
            [
                describe(
                    parse.flag(name),
                    got=getattr(parsed.get(SFTConfig), name),
                    expected="nothing: these are pairs",
                    do="leave it out, or leave out --method and --preference-format",
                )
                for name in of_sft
            ]
        )
        alone = align.preference_format == "completion_label" and "method" not in parsed.explicit
        return replace(align, method="kto") if alone else align
    first = next((record.value for file in files for record in records(file)), None)
    if of_sft or not isinstance(first, dict) or not is_preference(first):
        return None
    paired = "chosen" in first or "preferred_output" in first
    return align if paired else replace(align, method="kto")


Found = TypeVar("Found")


def _numbered(records: Iterable[Found], number: int, files: Sequence[Path]) -> Found:
    """Return the example with this number, from 1. Raises DataError if there are fewer."""
    example = next(islice(records, number - 1, None), None)
    if example is None:
        where = ", ".join(map(str, files))
        raise DataError(
            describe(
                where,
                got=f"fewer than {number} examples",
                expected="that many",
                do="lower --example",
            )
        )
    return example


def _preview(
    files: Sequence[Path], tokenizer: ChatTokenizer, tool: DataToolConfig, options: SFTConfig
) -> int:
    from megatron_llama.tune.sft.dataset import parsed_examples
    from megatron_llama.tune.sft.problems import UnusableError

    formats: dict[str, str] = {}
    where, example = _numbered(parsed_examples(files, options, formats), tool.example, files)
    try:
        if isinstance(example, UnusableError):
            raise example
        encoded = tokenizer.read(example, options.loss_on)
    except UnusableError as problem:
        print(problem.at(where))
        return 1
    count = len(encoded.ids)
    longest = tool.seq_length + 1
    cut = f", of which a sample holds {longest:,}" if count > longest else ""
    print(
        f"{where}: format {list(formats.values())[-1]}, {count:,} tokens{cut}, "
        f"{sum(encoded.loss_mask):,} in the loss{_left_out(example)}\n\n{encoded.text}\n"
    )
    _print_tokens(tokenizer, tool, encoded.ids, encoded.loss_mask)
    return 0


def _left_out(example: Example) -> str:
    """Return words on the number of messages of an example that are marked as not to be learned."""
    count = 0 if isinstance(example, Passage) else len(example.unlearned)
    return f"; {counted(count, 'message')} marked as not learned" if count else ""


def _print_tokens(
    tokenizer: ChatTokenizer, tool: DataToolConfig, ids: Sequence[int], mask: Sequence[bool]
) -> None:
    """Print tokens, with those in the loss marked."""
    color = tool.color == "always" or (tool.color == "auto" and sys.stdout.isatty())
    opened, closed = (_GREEN, _PLAIN) if color else ("[[", "]]")
    spelt = zip(tokenizer.spelt(ids), mask, strict=True)
    for counts, group in groupby(spelt, key=lambda pair: pair[1]):
        line = "|".join(text.replace("\n", "\\n") for text, _ in group)
        print(f"{opened}{line}{closed}" if counts else line)


def _preview_pair(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    tool: DataToolConfig,
    options: SFTConfig,
    align: AlignConfig,
) -> int:
    from megatron_llama.tune.preference.dataset import (
        encode_preference,
        most_tokens,
        parsed_preferences,
    )
    from megatron_llama.tune.preference.methods import CHOSEN
    from megatron_llama.tune.preference.pairs import unpaired
    from megatron_llama.tune.sft.problems import UnusableError

    formats: dict[str, str] = {}
    where, preference = _numbered(
        parsed_preferences(files, options, align, formats), tool.example, files
    )
    try:
        if isinstance(preference, UnusableError):
            raise preference
        encoded, kinds, _ = encode_preference(tokenizer, preference, align.method)
    except UnusableError as problem:
        print(problem.at(where))
        return 1
    print(f"{where}: format {list(formats.values())[-1]}")
    words = ("good", "bad") if align.method == "kto" else ("chosen", "rejected")
    lengths = [len(coded.ids) for coded in encoded]
    completions = [single.completion for single in unpaired(preference)]
    for coded, kind, completion in zip(encoded, kinds, completions, strict=True):
        together = [len(coded.ids)] if align.method == "kto" else lengths
        longest = most_tokens(together, tool.seq_length, align.method)
        cut = f", of which a sample holds {longest:,}" if len(coded.ids) > longest else ""
        joined = (
            "; the tokenizer joins the end of the prompt with the completion"
            if coded.merged
            else ""
        )
        print(
            f"\n{words[kind != CHOSEN]}: {len(coded.ids):,} tokens{cut}, {coded.prompt:,} of the "
            f"prompt, {sum(coded.loss_mask):,} in the loss{joined}{_left_out(completion.example)}"
            f"\n\n{coded.text}\n"
        )
        _print_tokens(tokenizer, tool, coded.ids, coded.loss_mask)
    return 0


def _check_pairs(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    tool: DataToolConfig,
    options: SFTConfig,
    align: AlignConfig,
) -> int:
    from megatron_llama.tune.preference.dataset import PairSamples, read_pairs
    from megatron_llama.tune.preference.methods import CHOSEN, REJECTED

    pairs = read_pairs(files, tokenizer, options, align, tool.seq_length)
    every = range(len(pairs))
    samples = PairSamples(pairs, every, tool.seq_length, packing=True, method=align.method)
    targets = {
        kind: Counter(
            int(mask.sum())
            for mask, own in zip(pairs.loss_mask, pairs.kinds, strict=True)
            if own == kind
        )
        for kind in (CHOSEN, REJECTED)
    }
    words = ("good", "bad") if align.method == "kto" else ("chosen", "rejected")
    charts = (
        ("Tokens of a prompt with a completion", pairs.lengths),
        (f"Tokens of {words[0]} completions", targets[CHOSEN]),
        (f"Tokens of {words[1]} completions", targets[REJECTED]),
    )
    return _show(tool, options, "Pairs", pairs, samples, charts)


def _check(
    files: Sequence[Path], tokenizer: ChatTokenizer, tool: DataToolConfig, options: SFTConfig
) -> int:
    from megatron_llama.tune.sft.dataset import ExampleSamples, read_examples

    examples = read_examples(files, tokenizer, options, tool.seq_length)
    every = range(len(examples))
    samples = ExampleSamples(examples, every, tool.seq_length, packing=True)
    targets = Counter(int(mask.sum()) for mask in examples.loss_mask)
    shares = Counter(int(100 * mask.mean()) for mask in examples.loss_mask)
    charts = (
        ("Tokens of an example", examples.lengths),
        ("Tokens in the loss", targets),
        ("Share of tokens in the loss, %", shares),
    )
    return _show(tool, options, "Examples", examples, samples, charts)


def _show(
    tool: DataToolConfig,
    options: SFTConfig,
    title: str,
    examples: Examples,
    samples: FilledSamples,
    charts: Sequence[tuple[str, Mapping[int, int]]],
) -> int:
    """Print the report of a run on the examples and on the packed ``samples``; write the page of
    ``stats``, or print the first of its charts. Return the exit status."""
    from megatron_llama.files import replace_file
    from megatron_llama.planner.pictures.histogram import page, quantiles, text_bars

    lines = list(examples.report(None if tool.action == "check" else 10))
    if len(examples):
        packed = (
            f"{len(samples):,} samples of {tool.seq_length:,} tokens, {samples.filled:.1%} full"
        )
        lines.append(f"with --packing {packed}; without {len(examples):,}")
    print("\n".join(lines))
    if tool.action == "stats":
        replace_file(Path(tool.output), page(title, lines, charts).encode())
        print(f"wrote {tool.output}")
    elif charts[0][1]:
        name, lengths = charts[0]
        print(f"{name[0].lower()}{name[1:]}: {quantiles(lengths)}")
        print("\n".join(text_bars(lengths)))
    return 1 if examples.problems and options.on_bad_sample == "stop" else 0
