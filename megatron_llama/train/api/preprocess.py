"""Text as an indexed dataset."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from megatron_llama.data.preprocess import PreprocessReport
from megatron_llama.data.preprocess import preprocess as run
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.train.api.common.options import read_options


def preprocess(
    input: str | PathLike[str] | Sequence[str | PathLike[str]],
    output_prefix: str | PathLike[str],
    **options: object,
) -> PreprocessReport:
    """Tokenize the files and folders ``input`` into the indexed dataset ``output_prefix``, as
    ``python -m megatron_llama preprocess`` does; ``options`` are its own, with underscores. The
    dataset appears when it is complete.

    Its workers are forks of this process while it has a single thread. A program that has others,
    as with torch imported, starts them anew: then it needs ``if __name__ == "__main__":``.

    ```python
    import megatron_llama as ml

    with open("data/words.txt", "w") as file:
        file.write("The import statement finds a module. The return statement leaves one.\\n" * 40)

    report = ml.preprocess(
        "data/words.txt", "data/words", tokenizer_model="data/docs-tokenizer", workers=1
    )
    print(report.documents, report.tokens)
    ```

    Raises ConfigError for options that cannot be used, and DataError for text or places that
    cannot. Then nothing is written."""
    paths = [input] if isinstance(input, str | PathLike) else [*input]
    given = {"input": [fspath(path) for path in paths], "output_prefix": fspath(output_prefix)}
    parsed = read_options(given, options, (PreprocessConfig,))
    return run(parsed.get(PreprocessConfig))
