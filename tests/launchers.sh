#!/usr/bin/env bash
# The launch files under the clients of their platforms: Kubeflow's API models, SkyPilot's and dstack's parsers, Ray itself. They bring
# hundreds of packages (1 GB), so they stay in an environment of their own, beside the one that everything else runs in.
# Arguments go to pytest: bash tests/launchers.sh -k dstack
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
packages=(skypilot dstack kubeflow-trainer-api kubeflow-training 'ray[train]' pytest)
stamp=.venv/launchers/installed-$(cat tests/launchers/constraints.txt tests/launchers.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/launchers (once)"
    rm -rf .venv/launchers
    .venv/bin/python -m venv .venv/launchers
    .venv/launchers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint tests/launchers/constraints.txt "${packages[@]}"
    touch "$stamp"
fi
# Without the other tests' conftest, which imports torch.
PYTHON=$PWD/.venv/bin/python exec .venv/launchers/bin/python -m pytest --noconftest -p no:cacheprovider -m launchers tests/launchers "$@"
