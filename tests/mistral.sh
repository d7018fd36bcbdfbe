#!/usr/bin/env bash
# The tests with Mistral's own tokenizers, which mistral-common ships. Where it is installed, transformers reads Mistral's folders with it
# and not with what all others read them, so it is put into a folder of its own beside the environment. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
needed='mistral_common|jsonschema|jsonschema-specifications|referencing|rpds-py|attrs|pydantic-extra-types|pycountry'
mapfile -t packages < <(grep -E "^($needed)==" constraints.txt)
stamp=.venv/mistral/installed-$(cat constraints.txt tests/mistral.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/mistral (once)"
    rm -rf .venv/mistral
    # No dependencies: the others are there, and numpy is newer than the package asks for.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .venv/mistral "${packages[@]}"
    touch "$stamp"
fi
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/.venv/mistral${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -m pytest -m mistral tests/data/tokenizer/test_mistral.py "$@"
