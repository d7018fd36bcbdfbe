#!/usr/bin/env bash
# usage: bash checkpoints_conversion/megatron_to_hf.sh --load_path FOLDER --save_path FOLDER [--option value ...]
#
# A checkpoint of Megatron-LLaMA or Megatron-LM as a HuggingFace folder, with the options of Megatron-LLaMA's own script:
#   megatron_to_hf.sh --load_path CHECKPOINT --save_path HF --target_params_dtype bf16
# Any option of `python -m megatron_llama convert` may follow as `--name value`.
set -euo pipefail
script=${BASH_SOURCE[0]}
to=hf
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_options "$@"
exec "$python" -m megatron_llama convert "$source" "$target" --to "$to" ${forward[@]+"${forward[@]}"}
