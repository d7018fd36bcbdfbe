#!/usr/bin/env bash
# usage: bash checkpoints_conversion/hf_to_megatron.sh --load_path FOLDER --save_path FOLDER [--option value ...]
#
# A HuggingFace folder as a checkpoint of Megatron-LLaMA, with the options of Megatron-LLaMA's own script:
#   hf_to_megatron.sh --load_path HF --save_path OUT --target_tensor_model_parallel_size 2 --target_params_dtype bf16
# Any option of `python -m megatron_llama convert` may follow as `--name value`; `--to megatron` writes Megatron-LM's format.
set -euo pipefail
script=${BASH_SOURCE[0]}
to=megatron-llama
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_options "$@"
[[ " ${forward[*]-} " == *" --to "* ]] || forward+=(--to "$to")
exec "$python" -m megatron_llama convert "$source" "$target" "${forward[@]}"
