"""Which buckets are updated on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.engine.plan.offload import host_buckets
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan

from tests.parallel.cases import Layout


@pytest.mark.parametrize("split", [(3, 1), (1, 3)])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.3, 0.5, 0.8, 0.95, 1.0])
def test_both_ends_of_a_pipeline_update_a_tied_embedding_in_one_place(fraction: float, split: tuple[int, int]) -> None:
    """It is the first bucket of one rank and the last of the other, and each chooses alone."""
    config = Layout(pp=2, dp=2).config()
    config = replace(
        config, model=replace(config.model, tie_word_embeddings=True), parallel=replace(config.parallel, pipeline_layer_split=split)
    )
    on_host = []
    for rank in range(2):
        plan = rank_bucket_plan(config, dp=2, rank=rank)
        chosen = host_buckets(plan, fraction)
        tied = {bucket.index for bucket in plan.buckets if bucket.kind.tied}
        assert tied and all(plan.buckets[bucket].kind.trainable for bucket in chosen)
        on_host.append(tied <= set(chosen))
        left = sum(bucket.numel for bucket in plan.buckets if bucket.index not in chosen)
        whole = sum(bucket.numel for bucket in plan.buckets)
        most = max(bucket.numel for bucket in plan.buckets)
        assert left <= (1 - fraction) * whole + most, "a bucket more than is asked for stays on the device, at most"
    assert on_host == [fraction == 1.0] * 2
