"""``convert``: a model folder in another format."""

from __future__ import annotations

import time

from megatron_llama.config.parse import Parsed
from megatron_llama.engine.plan.memory import sized


def convert(parsed: Parsed) -> None:
    """Convert and print the result, and the fields that the target's own program will not use."""
    from megatron_llama.converter.api.convert import convert as write
    from megatron_llama.converter.configs import ConvertConfig

    options = parsed.get(ConvertConfig)
    start = time.perf_counter()
    # The function has the defaults: some formats refuse options that they do not know.
    done = write(**{name: getattr(options, name) for name in parsed.explicit})
    for note in done.notes:
        print(f"note: {note}")
    seconds = time.perf_counter() - start
    print(
        f"converted {done.source_format} {done.source} to {options.to} {options.dst} "
        f"({done.dtype}, {sized(done.bytes)}, {seconds:.1f} s)"
    )
