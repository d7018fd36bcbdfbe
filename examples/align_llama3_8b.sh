#!/usr/bin/env bash
# LLaMA 3 8B: tuning of all weights on preferences (DPO),
# on one machine with eight GPUs of 80 GB.
#   bash examples/align_llama3_8b.sh FOLDER --train-data FILE ... [options]
# FOLDER is a HuggingFace folder with config.json, *.safetensors and the tokenizer.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 0 ] || { echo "usage: bash examples/align_llama3_8b.sh FOLDER --train-data FILE ... [options]" >&2; exit 2; }
weights=$1
shift
exec bash "$here/launch/node.sh" align --config "$here/align_llama3_8b.yaml" --init-from-hf "$weights" "$@"
