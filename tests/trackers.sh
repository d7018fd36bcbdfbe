#!/usr/bin/env bash
# The tests with MLflow and Trackio. Their clients bring forty packages, one of them in another version than ours, so they are put into a
# folder of their own beside the environment, and every other test shows that nothing needs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
packages=("mlflow-skinny==3.17.2" "trackio==0.43.0")
stamp=.venv/trackers/installed-$(cat constraints.txt tests/trackers.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/trackers (once)"
    rm -rf .venv/trackers
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --target .venv/trackers "${packages[@]}"
    touch "$stamp"
fi
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/.venv/trackers${PYTHONPATH:+:$PYTHONPATH}
.venv/bin/python -m pytest -m trackers tests/trackers "$@"
