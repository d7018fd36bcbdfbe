#!/usr/bin/env bash
# usage: bash examples/quickstart.sh [--output FOLDER]
#
# From nothing to a trained LLaMA in HuggingFace format:
# It makes .venv in the clone with the tested versions of all packages, and there it starts
# `python -m megatron_llama quickstart`, with these options: that trains a tokenizer and a small
# model on Python's documentation with several processes, prints a sample of text, exports the model,
# and draws its curves. All files stay in the clone, in runs/quickstart. You may start it again: an interrupted run
# is resumed, and a finished one is only evaluated and sampled.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without extras: what the quickstart does not need is installed when it is needed.
bash tools/venv.sh none
export PYTHONDONTWRITEBYTECODE= # the installation leaves compiling to the first import: what it compiles is kept for the next process
exec .venv/bin/python -m megatron_llama quickstart "$@"
