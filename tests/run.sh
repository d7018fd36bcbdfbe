#!/usr/bin/env bash
# All tests, from nothing: makes .venv, installs the tested versions, checks style and types, runs pytest.
# Arguments go to pytest: bash tests/run.sh tests/plans/test_buckets.py -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
export OMP_NUM_THREADS=1 # several processes share the cores; more threads in each only get in each other's way
if [ "${1-}" = --soak ]; then # 200 SIGKILLs at random moments, twice: saves that training waits for, and in the background
    set -- tests/e2e/test_signals.py -k killed_at_random --soak
fi
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
# Beside the tests: types, and the kernels in an environment of their own, which has what all the others show not to need.
aside=$(mktemp) status=0
(.venv/bin/mypy && bash tests/kernels.sh) >"$aside" 2>&1 &
# Three at a time on two cores: half of a test's life is waiting for processes. A file stays together, for what its tests share;
# files come in the order of their folders, so that the long ones among them are not all left for the end.
.venv/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder || status=$?
wait "$!" || status=$?
cat "$aside"
rm "$aside"
exit "$status"
