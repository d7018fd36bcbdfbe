#!/usr/bin/env bash
# LLaMA 3 8B from scratch on one machine with eight GPUs of 80 GB.
#   bash examples/llama3_8b.sh --data-path PREFIX [options]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/launch/node.sh" pretrain --config "$here/llama3_8b.yaml" "$@"
