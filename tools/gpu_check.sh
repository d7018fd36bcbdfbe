#!/usr/bin/env bash
# What only a GPU can show, with the active Python (torch for CUDA, pytest): the tests that need one, and the benches; --help says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
"$python" -c 'import torch' 2>/dev/null || {
    echo "error: $(command -v "$python" || echo "$python") cannot import torch: activate an environment with torch for CUDA" >&2
    exit 2
}
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m tools.gpucheck "$@"
