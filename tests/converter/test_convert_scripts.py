"""The scripts under Megatron-LLaMA's own names and options."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from megatron_llama.cli import main

from tests.converter.converting import assert_same, hf_folder, loaded, rank_file

SCRIPTS = Path(__file__).parents[2] / "checkpoints_conversion"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The script, with a Python that writes its arguments line by line."""
    command, environment = (
        [str(SCRIPTS / script), *words],
        {**os.environ, "PYTHON": str(Path(__file__).with_name("arguments.sh"))},
    )
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def run_here(script: str, *words: str) -> None:
    """What the script starts, in this process."""
    done = run(script, *words)
    assert done.returncode == 0, done.stderr
    option, module, *arguments = done.stdout.splitlines()
    assert (option, module) == ("-m", "megatron_llama") and main(arguments) == 0


def test_there_and_back(tmp_path: Path) -> None:
    """With every option that their example scripts give."""
    original = hf_folder(tmp_path / "hf", torch.bfloat16, num_key_value_heads=8)
    common = ["--target_params_dtype", "bf16", "--make_vocab_size_divisible_by", "1", "--print-checkpoint-structure"]
    sizes = ["--target_tensor_model_parallel_size", "2", "--target_pipeline_model_parallel_size=2", "--target_data_parallel_size", "16"]
    paths = ["--load_path", str(original), "--save_path", str(tmp_path / "there"), "--megatron-path", "/nowhere"]
    run_here("hf_to_megatron.sh", *paths, *sizes, *common)
    args = loaded(rank_file(tmp_path / "there", 1, 1))["args"]
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.padded_vocab_size) == (2, 2, 300)
    words = ["--convert_checkpoint_from_megatron_to_transformers", *common, "--max_shard_size", "1MB", "--workers", "1"]
    run_here("megatron_to_hf.sh", "--load_path", str(tmp_path / "there"), "--save_path", str(tmp_path / "back"), *words)
    assert_same(tmp_path / "back", original)


def test_wrong_options(tmp_path: Path) -> None:
    both = ["--load_path", "a", "--save_path", "b"]
    for script in ("hf_to_megatron.sh", "megatron_to_hf.sh"):
        for words, says in (
            (["--load_path", "a"], "error: --load_path, --save_path: got nothing, expected two folders; give both"),
            ([*both, "--target_params_dtype", "int8"], "error: --target_params_dtype: got int8, expected fp32, bf16 or fp16"),
            (["stray"], "error: stray: got a word, expected an option"),
            (["--load_path"], "error: --load_path: got nothing, expected a value"),
        ):
            done = run(script, *words)
            assert done.returncode == 2 and done.stderr.startswith(says), done.stderr
