"""Checks of context parallelism that exchanges the sequence for heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron_llama.config.schema import Config
from megatron_llama.errors import describe

_HIERARCHY = "--hierarchical-context-parallel-sizes"


def context_problems(config: Config) -> Iterator[str]:
    """Yield problems of an exchange of the sequence for heads between context-parallel ranks."""
    parallel = config.parallel
    cp = parallel.context_parallel_size
    sizes = parallel.hierarchical_context_parallel_sizes
    queries = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    if parallel.cp_comm_type != "a2a+p2p":
        if sizes:
            yield describe(
                _HIERARCHY,
                got=f"--cp-comm-type {parallel.cp_comm_type}",
                expected="a2a+p2p: other types have no groups of neighbours",
                do="leave it out, or give --cp-comm-type a2a+p2p",
            )
    elif (cp > 1 or sizes) and (len(sizes) != 2 or min(sizes) < 2 or prod(sizes) != cp):
        yield describe(
            _HIERARCHY,
            got=" ".join(map(str, sizes)) or "none",
            expected="the ranks of a group that exchanges heads, and the groups of the ring: two "
            f"numbers of 2 or more whose product is --context-parallel-size {cp}",
            do=_fitting(queries, cp),
        )
        return
    heads = parallel.head_ranks
    if heads and queries > 0 and queries % heads:
        got = f"{parallel.cp_comm_type} over {heads} ranks"
        wanted = f"a divisor of the {queries} query heads of a tensor-parallel rank, as each of "
        wanted += "these ranks computes as many"
        yield describe("--cp-comm-type", got=got, expected=wanted, do=_fitting(queries, cp))


def _fitting(queries: int, cp: int) -> str:
    """Return the remedy: context-parallel layouts with an exchange of heads that are possible."""
    sizes = [size for size in range(2, cp // 2 + 1) if cp % size == 0 and queries % size == 0]
    largest = sizes[-1:]
    ways = [f"{_HIERARCHY} {size} {cp // size} with --cp-comm-type a2a+p2p" for size in largest]
    ways += ["--cp-comm-type a2a"] * (queries % cp == 0)
    return f"give {' or '.join((*ways, '--cp-comm-type p2p'))}"
