#!/usr/bin/env bash
# How much communication is hidden, on an emulated cluster of this machine: `tools/bench_overlap.sh --help`.
# Runs with the active Python: that of $VIRTUAL_ENV, else python3 in PATH. Needs root and iproute2.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
command -v "$python" >/dev/null || {
    echo "error: no $python; activate a virtual environment with torch" >&2
    exit 1
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import torch, megatron_llama' || {
    echo "error: $(command -v "$python") cannot import torch and megatron_llama; activate an environment that can (tools/venv.sh makes one)" >&2
    exit 1
}
echo "python: $(command -v "$python")"
exec "$python" -m tools.overlap "$@"
