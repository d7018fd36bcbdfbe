#!/usr/bin/env bash
# The tests with lm-evaluation-harness. It brings forty packages, so it has an environment of its own, which sees that of the other tests:
# these show that nothing else needs it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
package=$(grep '^lm_eval==' constraints.txt)
stamp=.venv/lm_eval/installed-$(cat constraints.txt tests/lm_eval.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing $package into $PWD/.venv/lm_eval (once)"
    rm -rf .venv/lm_eval
    .venv/bin/python -m venv .venv/lm_eval
    base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$base" >"$(.venv/lm_eval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    .venv/lm_eval/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt "$package"
    touch "$stamp"
fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
.venv/lm_eval/bin/python -m pytest -m lm_eval tests/e2e/test_tasks.py "$@"
