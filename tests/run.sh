#!/usr/bin/env bash
# The tests, from nothing: makes .venv, installs the tested versions, checks style and types, runs pytest. 6 to 11 minutes on two cores, with --all 32 to 65.
#   bash tests/run.sh          all that a change can break
#   bash tests/run.sh --all    also what is marked long, older processors, the kernels, trackers, launchers, lm-evaluation-harness, Lightning and Mistral's tokenizers, and the
#                             documentation in a browser (tests/processors.sh, ...): what .ci/run does
#   bash tests/run.sh --soak   200 SIGKILLs at random moments, twice: saves that training waits for, and in the background; then what is marked soak, and every case of
#                             what is marked few
# Other arguments go to pytest: bash tests/run.sh tests/engine/plan/test_buckets.py -x, or with long tests: bash tests/run.sh --all tests/e2e
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
export PYTHONDONTWRITEBYTECODE= # what is compiled is kept for the hundreds of processes that tests start, and asserts are rewritten once
export OMP_NUM_THREADS=1 # several processes share the cores; more threads in each only get in each other's way
if [ "$*" = --soak ]; then
    .venv/bin/python -m pytest tests/e2e/test_signals.py -k killed_at_random --soak
    set -- -m "soak or few" --soak
fi
if [ $# -gt 0 ] && [ "$*" != --all ]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
# Beside the tests: types, and the kernels in an environment of their own, which has what all the others show not to need.
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
status=0
(.venv/bin/mypy && if [ $# -gt 0 ]; then bash tests/processors.sh && bash tests/kernels.sh && bash tests/trackers.sh && bash tests/launchers.sh && bash tests/site.sh && bash tests/lm_eval.sh && bash tests/mistral.sh && bash tests/lightning.sh; fi) >"$folder/checks" 2>&1 &
# Three at a time on two cores: half of a test's life is waiting for processes. A file stays together, for what its tests share;
# files come in the order of their folders, so that the long ones among them are not all left for the end.
.venv/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=20 "$@" | tee "$folder/tests" || status=$?
wait "$!" || status=$?
cat "$folder/checks"
tail -n 1 "$folder/tests"
exit "$status"
