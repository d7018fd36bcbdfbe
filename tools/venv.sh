#!/usr/bin/env bash
# Make .venv at the root of the clone and install the tested versions: `bash tools/venv.sh hf` or `... test`.
# Does nothing when that was already done for the same pyproject.toml and constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=$1
stamp=.venv/installed-$extra-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is $("$python" --version 2>&1), Python 3.11 or later is needed; set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "installing into $PWD/.venv (once)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]"
touch "$stamp"
