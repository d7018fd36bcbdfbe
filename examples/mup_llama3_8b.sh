#!/usr/bin/env bash
# The shape of LLaMA 3 8B with rates tuned on a narrow model (muP), on one machine with eight GPUs of 80 GB.
#   bash examples/mup_llama3_8b.sh --data-path PREFIX [options]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/launch/node.sh" pretrain --config "$here/mup_llama3_8b.yaml" "$@"
