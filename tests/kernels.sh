#!/usr/bin/env bash
# The tests of Triton's kernels, without a GPU: in Triton's interpreter, against torch; and compiled for GPUs that are not here.
# Triton is large and its interpreter is chosen when it is imported, so both stay out of the other tests, which thereby show that nothing
# needs it. Arguments go to pytest: bash tests/kernels.sh -k swiglu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
mapfile -t packages < <(grep -E '^(triton|liger-kernel|torchao)==' constraints.txt)
stamp=.venv/kernels/installed-$(echo "${packages[@]}" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/kernels (once)"
    rm -rf .venv/kernels
    # No dependencies: torch is there, and the one for CPUs that the tests run with asks for no Triton.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .venv/kernels "${packages[@]}"
    touch "$stamp"
fi
export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$PWD/.venv/kernels${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -m pytest -m kernels -W "ignore::RuntimeWarning" tests/kernels "$@" # overflows are part of what is tested
