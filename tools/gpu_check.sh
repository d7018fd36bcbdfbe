#!/usr/bin/env bash
# What only a GPU can show, with the active Python (torch for CUDA, pytest): the tests marked gpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: $(command -v "$python") sees no GPU: install torch for CUDA, or run this where there is one" >&2
    exit 1
}
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pytest -m gpu "$@"
