"""What a run is, in words: the same for its banner, its dry run, its plan and its page."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig, LoraConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.train.setup.description import describe_config
from megatron_llama.train.setup.resolve import resolve

SMALL = Config(
    model=ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=500),
    training=TrainingConfig(seq_length=32, micro_batch_size=2, global_batch_size=24, train_iters=6, bf16=True),
    parallel=ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    data=DataConfig(data_path=("3", "a", "1", "b")),
)


def described(config: Config) -> dict[str, str]:
    return describe_config(resolve(config, 8), 8)


def test_each_subject_is_said_once() -> None:
    said = described(replace(SMALL, checkpoint=CheckpointConfig(save="run", save_interval=3, load="auto")))
    assert said["model"] == "228,416 parameters in 39 tensors, all trained; 4 layers, hidden size 64, vocabulary 500, padded to 512"
    assert said["layout"] == "8 processes = tp 2 x cp 1 x pp 1 x dp 4, sequence parallel; pipeline 1f1b, sharding optim"
    assert (said["precision"], said["iterations"], said["start"]) == ("bf16", "6", "--load auto")
    assert said["data"] == f"a, b (--split {SMALL.data.split})"
    assert said["batch"] == "24 samples = 3 microbatches x 2 x dp 4; 768 tokens a step, 32 a sample"
    assert said["saves"] == "run, every 3 iterations and at the end"
    assert not {"pad token", "ramp-up", "exports"} & said.keys(), "of what there is not nothing is said"


def test_what_a_run_knows_stands_in_its_place() -> None:
    known = {"iterations": "3 to 6", "start": "resumes from run/iter_0000002"}
    alone = described(SMALL)
    said = describe_config(resolve(SMALL, 8), 8, known)
    assert said == alone | known and list(said) == list(alone)


def test_what_is_trained_of_a_model() -> None:
    frozen = replace(SMALL, optimizer=replace(SMALL.optimizer, freeze=("model.layers.*", "model.norm.*")))
    assert f", {2 * 500 * 64:,} trained in 2 tensors; " in described(frozen)["model"]
    adapted = replace(SMALL, lora=LoraConfig(lora_rank=2, lora_target_modules=("q_proj",)))
    assert f", {4 * 2 * 2 * 64:,} trained in 8 tensors (low-rank additions, rank 2); " in described(adapted)["model"]
