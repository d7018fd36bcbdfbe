"""Continuations of some prompts, printed while the model trains.

They work in every layout, because the pipeline's evaluation makes them with the weights where the
engine has them. Each new token is one forward pass over the whole text, greedy and without a cache:
slow for long texts, but little compared with the steps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.distributed.axes import Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import MetricLog
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.tokenizer.base import Tokenizer, beyond_vocabulary

Prompt = Callable[[str], Sequence[int]]
"""Makes the tokens that the model continues from a text."""


class SampleTexts:
    """Prints continuations of --sample-prompt every --sample-interval iterations."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        runtime: PipelineRuntime,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """``prompts``: those of ``encoded_prompts``."""
        self._log = config.log
        self._runtime = runtime
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._prompts = prompts
        if not prompts:
            return
        longest = max(map(len, prompts)) + self._log.sample_tokens
        parallel = config.parallel
        # Context parallelism cuts a sequence into 2 x cp chunks, sequence parallelism each of them
        # among the tensor-parallel ranks.
        unit = 2 * parallel.context_parallel_size
        if parallel.sequence_parallel:
            unit *= parallel.tensor_model_parallel_size
        self._length = min(config.training.seq_length, -(-longest // unit) * unit)

    def due(self, state: TrainState, *, last: bool) -> bool:
        """Whether to print continuations after this step, which may be the last one of the run."""
        interval = self._log.sample_interval
        return interval > 0 and (state.iteration % interval == 0 or last)

    def write(self, state: TrainState, log: MetricLog) -> None:
        """Print the continuations. Collective."""
        assert self._tokenizer is not None
        for text, tokens in zip(self._log.sample_prompt, self.continuations(), strict=True):
            continuation = self._tokenizer.decode(tokens)
            log.say(f" sample at iteration {state.iteration} | {text!r} | {continuation!r} |")

    def continuations(self) -> list[list[int]]:
        """The new tokens of each prompt, without the end token. Collective."""
        assert self._tokenizer is not None
        lengths = torch.tensor([len(prompt) for prompt in self._prompts])
        count = len(self._prompts)
        ids = torch.zeros(self._length, count, dtype=torch.int64)
        for column, prompt in enumerate(self._prompts):
            ids[: len(prompt), column] = torch.tensor(prompt)
        done = torch.zeros(count, dtype=torch.bool)
        columns = torch.arange(count)
        for _ in range(self._log.sample_tokens):
            found = self._runtime.predict(
                Batch(ids.to(self._mesh.device), ids.to(self._mesh.device))
            ).cpu()[lengths - 1, columns]
            done |= found == self._tokenizer.eos_id
            if done.all():
                break
            ids[lengths[~done], columns[~done]] = found[~done]
            lengths += ~done
        return [
            ids[len(prompt) : lengths[column], column].tolist()
            for column, prompt in enumerate(self._prompts)
        ]


def encoded_prompts(
    config: Config, tokenizer: Tokenizer | None, prompt: Prompt | None
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each --sample-prompt; none in a run that prints no continuations. ``prompt``
    makes them, by default of the plain text.

    Raises ConfigError without a tokenizer, or for a prompt that leaves no room within --seq-length
    or has a token that the model does not have."""
    log = config.log
    if log.sample_interval == 0:
        return ()
    if tokenizer is None:
        do = "give --tokenizer-model"
        raise ConfigError(
            "--sample-interval", got="no tokenizer", expected="one, for the prompts", do=do
        )
    prompts = tuple(tuple((prompt or tokenizer.encode_prompt)(text)) for text in log.sample_prompt)
    do = "change --sample-prompt, or give --resize-embeddings to add rows to trained weights"
    for ids in prompts:
        beyond = beyond_vocabulary(
            "--sample-prompt", ids, config.model.vocab_size, tokenizer, do=do
        )
        if beyond is not None:
            raise ConfigError(beyond)
    longest = max(map(len, prompts)) + log.sample_tokens
    room = config.training.seq_length
    if longest > room or not all(prompts):
        raise ConfigError(
            "--sample-prompt",
            got=f"{longest} tokens with their continuation",
            expected=f"1 to {room}, which is seq_length",
            do="shorten --sample-prompt or lower --sample-tokens",
        )
    return prompts
