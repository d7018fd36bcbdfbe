#!/usr/bin/env bash
# LLaMA 2 13B from scratch on one machine with eight GPUs of 80 GB.
#   bash examples/llama2_13b_1node.sh --data-path PREFIX [options]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/launch/node.sh" pretrain --config "$here/llama2_13b_1node.yaml" "$@"
