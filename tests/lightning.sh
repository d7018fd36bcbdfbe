#!/usr/bin/env bash
# The tests with Lightning. Its three wheels (4 MB) are put into a folder of their own beside the environment, without what they ask for besides:
# that is torch, and clients of the web. Every other test shows that nothing needs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
packages=("lightning==2.6.6" "lightning-utilities==0.15.3" "torchmetrics==1.9.0")
stamp=.venv/lightning/installed-$(cat constraints.txt tests/lightning.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/lightning (once)"
    rm -rf .venv/lightning
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target .venv/lightning "${packages[@]}"
    touch "$stamp"
fi
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/.venv/lightning${PYTHONPATH:+:$PYTHONPATH}
.venv/bin/python -m pytest -m lightning tests/integrations "$@"
