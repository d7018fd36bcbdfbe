#!/usr/bin/env bash
# Run the tests and benchmarks that need a GPU:
#   bash tools/gpu_check.sh
# It uses the active Python, which needs torch for CUDA and pytest. --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
[[ " $* " == *" --help "* || " $* " == *" -h "* ]] || "$python" -c 'import torch' 2>/dev/null || {
    echo "error: $(command -v "$python" || echo "$python") cannot import torch: activate an environment with torch for CUDA" >&2
    exit 2
}
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m tools.gpucheck "$@"
