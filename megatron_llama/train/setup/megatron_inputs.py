"""The samples of --megatron-data-order."""

from __future__ import annotations

from megatron_llama.config.batch_ramp import run_samples
from megatron_llama.config.blend import Blend
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Samples, StreamSamples
from megatron_llama.data.megatron_order import (
    MegatronBlend,
    MegatronStream,
    samples_of_blend,
    samples_of_parts,
)
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.comm.host_memory import free_bytes
from megatron_llama.errors import DataError
from megatron_llama.train.setup.inputs import open_stream


def megatron_samples(
    config: Config,
    blend: Blend,
    part: int,
    *,
    eod: int | None,
    tokenizer: Tokenizer | None,
    share: tuple[int, int],
) -> Samples:
    """Open the samples of a part, TRAINING, for the whole length of the run. Raises DataError, also
    if Megatron's order ends before the run."""
    training = config.training
    wanted = run_samples(training)
    datasets = []
    for prefix, samples in zip(blend.prefixes, samples_of_parts(blend, wanted), strict=True):
        stream = open_stream(config, prefix, part, tokenizer=tokenizer, share=share)
        ordered = MegatronStream(
            stream,
            seed=training.seed,
            num_samples=samples,
            most_bytes=free_bytes(),
            data=config.data,
        )
        datasets.append(StreamSamples(ordered, config.data, eod))
    if len(datasets) == 1 and blend.shares is None:
        return datasets[0]
    sizes = [len(dataset) for dataset in datasets]
    blended = MegatronBlend(
        datasets, blend.shares or sizes, samples_of_blend(blend, wanted, sizes), config.data
    )
    if len(blended) < wanted:
        raise DataError(
            "--megatron-data-order",
            got=f"{len(blended):,} samples: Megatron reads datasets without weights once",
            expected=f"{wanted:,}, those of --train-iters",
            do="give each dataset of --data-path its weight, or train for fewer iterations",
        )
    return blended
