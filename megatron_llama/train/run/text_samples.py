"""Continuations of some prompts, printed while the model trains.

They work in every layout, because the pipeline's evaluation makes them from the engine's weights in
place. Each new token is one forward pass over the whole text, greedy and without a cache: slow for
long texts, but little compared with the steps in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.mesh import Mesh
from megatron_llama.metrics.log import MetricLog
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.pipeline.scoring import predict_tokens
from megatron_llama.train.run.callbacks import Part, Run


class SampleTexts(Part):
    """Prints continuations of --sample-prompt every --sample-interval iterations."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        runtime: PipelineRuntime,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        log: MetricLog,
    ) -> None:
        """``prompts``: those of ``encoded_prompts``, at least one."""
        self._options = config.log
        self._log = log
        self._runtime = runtime
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._prompts = prompts
        longest = max(map(len, prompts)) + self._options.sample_tokens
        parallel = config.parallel
        # Context parallelism cuts a sequence into 2 x cp chunks. Sequence parallelism divides each
        # chunk among the tensor-parallel ranks.
        unit = 2 * parallel.context_parallel_size
        if parallel.sequence_parallel:
            unit *= parallel.tensor_model_parallel_size
        self._length = min(config.training.seq_length, -(-longest // unit) * unit)

    def due(self, run: Run) -> bool:
        interval = self._options.sample_interval
        return interval > 0 and (run.iteration % interval == 0 or run.is_last)

    def on_due(self, run: Run) -> None:
        assert self._tokenizer is not None
        for text, tokens in zip(self._options.sample_prompt, self.continuations(), strict=True):
            continuation = self._tokenizer.decode(tokens)
            self._log.say(f" sample at iteration {run.iteration} | {text!r} | {continuation!r} |")

    def continuations(self) -> list[list[int]]:
        """Return the new tokens of each prompt, without the end token. Collective."""
        assert self._tokenizer is not None
        lengths = torch.tensor([len(prompt) for prompt in self._prompts])
        count = len(self._prompts)
        ids = torch.zeros(self._length, count, dtype=torch.int64)
        for column, prompt in enumerate(self._prompts):
            ids[: len(prompt), column] = torch.tensor(prompt)
        done = torch.zeros(count, dtype=torch.bool)
        columns = torch.arange(count)
        for _ in range(self._options.sample_tokens):
            next_ids = predict_tokens(
                self._runtime, Batch(ids.to(self._mesh.device), ids.to(self._mesh.device))
            ).cpu()[lengths - 1, columns]
            done |= next_ids == self._tokenizer.eos_id
            if done.all():
                break
            ids[lengths[~done], columns[~done]] = next_ids[~done]
            lengths += ~done
        return [
            ids[len(prompt) : lengths[column], column].tolist()
            for column, prompt in enumerate(self._prompts)
        ]
