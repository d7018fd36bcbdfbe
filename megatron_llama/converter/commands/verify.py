"""``verify``: whether two model folders hold the same model."""

from __future__ import annotations

from functools import partial

from megatron_llama.config.parse import Parsed
from megatron_llama.converter.configs import VerifyConfig


def verify(parsed: Parsed) -> int:
    """Print the comparisons, every difference and one verdict. Return the exit status: 0 if the
    models are equal, 1 if they differ."""
    from megatron_llama.converter.api.verify import verify as compare

    verified = compare(**vars(parsed.get(VerifyConfig)), report=partial(print, flush=True))
    return 0 if verified.equal else 1
