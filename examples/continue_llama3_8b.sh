#!/usr/bin/env bash
# Continued pretraining of LLaMA 3 8B from a HuggingFace folder (config.json, *.safetensors,
# tokenizer.json).
#   bash examples/continue_llama3_8b.sh FOLDER --data-path PREFIX [options]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 0 ] || { echo "usage: bash examples/continue_llama3_8b.sh FOLDER --data-path PREFIX [options]" >&2; exit 2; }
weights=$1
shift
exec bash "$here/launch/node.sh" pretrain --config "$here/continue_llama3_8b.yaml" --init-from-hf "$weights" "$@"
