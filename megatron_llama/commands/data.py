"""``data preview|check|stats``: what a run of ``sft`` would make of files of examples."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.errors import DataError, describe
from megatron_llama.sft.option_problems import refuse
from megatron_llama.sft.sft_config import DataToolConfig, SFTConfig

if TYPE_CHECKING:
    from megatron_llama.sft.chat import ChatTokenizer

SECTIONS = (DataToolConfig, SFTConfig)
_GREEN = "\x1b[1;32m"
_PLAIN = "\x1b[0m"


def data(parsed: Parsed) -> int:
    """Do what ``action`` says. Return the exit status: 1 if there are examples at which a run would
    stop."""
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
    refuse(wrong)
    from megatron_llama.api.common.examples import loss_parts
    from megatron_llama.sft.chat import ChatTokenizer
    from megatron_llama.sft.records import example_files
    from megatron_llama.tokenizer.load import load_tokenizer

    assert tool.tokenizer_model is not None
    files = example_files([*options.train_data, *options.valid_data])
    tokenizer = ChatTokenizer(load_tokenizer(tool.tokenizer_model), options.chat_template)
    print(
        f"chat template: {tokenizer.template.name}; in the loss: "
        f"{loss_parts(tokenizer.template.marks_answers, options)}"
    )
    for warning in tokenizer.require_end():
        print(warning, file=sys.stderr)
    if tool.action == "preview":
        return _preview(files, tokenizer, tool, options)
    return _check(files, tokenizer, tool, options)


def _preview(
    files: Sequence[Path], tokenizer: ChatTokenizer, tool: DataToolConfig, options: SFTConfig
) -> int:
    from megatron_llama.sft.dataset import parsed_examples
    from megatron_llama.sft.problems import UnusableError

    formats: dict[str, str] = {}
    found = next(islice(parsed_examples(files, options, formats), tool.example - 1, None), None)
    if found is None:
        where = ", ".join(map(str, files))
        raise DataError(
            describe(
                where,
                got=f"fewer than {tool.example} examples",
                expected="that many",
                do="lower --example",
            )
        )
    where, example = found
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
        f"{sum(encoded.loss_mask):,} in the loss\n\n{encoded.text}\n"
    )
    color = tool.color == "always" or (tool.color == "auto" and sys.stdout.isatty())
    opened, closed = (_GREEN, _PLAIN) if color else ("[[", "]]")
    for counts, group in groupby(
        zip(tokenizer.spelt(encoded.ids), encoded.loss_mask, strict=True), key=lambda pair: pair[1]
    ):
        line = "|".join(text.replace("\n", "\\n") for text, _ in group)
        print(f"{opened}{line}{closed}" if counts else line)
    return 0


def _check(
    files: Sequence[Path], tokenizer: ChatTokenizer, tool: DataToolConfig, options: SFTConfig
) -> int:
    from megatron_llama.sft.dataset import ExampleSamples, read_examples
    from megatron_llama.sft.histogram import page, quantiles, text_bars
    from megatron_llama.tokenizer.files import replace_file

    examples = read_examples(files, tokenizer, options, tool.seq_length)
    most = None if tool.action == "check" else 10
    lines = list(examples.report(most))
    if len(examples):
        samples = ExampleSamples(examples, range(len(examples)), tool.seq_length, packing=True)
        packed = (
            f"{len(samples):,} samples of {tool.seq_length:,} tokens, {samples.filled:.1%} full"
        )
        lines.append(f"with --packing {packed}; without {len(examples):,}")
    print("\n".join(lines))
    if tool.action == "stats":
        targets = Counter(int(mask.sum()) for mask in examples.loss_mask)
        shares = Counter(int(100 * mask.mean()) for mask in examples.loss_mask)
        charts = (
            ("Tokens of an example", examples.lengths),
            ("Tokens in the loss", targets),
            ("Share of tokens in the loss, %", shares),
        )
        replace_file(Path(tool.output), page("Examples", lines, charts).encode())
        print(f"wrote {tool.output}")
    elif examples.lengths:
        print(
            "\n".join(
                [
                    f"tokens of an example: {quantiles(examples.lengths)}",
                    *text_bars(examples.lengths),
                ]
            )
        )
    return 1 if examples.problems and options.on_bad_sample == "stop" else 0
