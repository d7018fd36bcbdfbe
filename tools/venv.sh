#!/usr/bin/env bash
# usage: bash tools/venv.sh EXTRA
#
# Make .venv at the root of the clone and install the package with the tested versions of its dependencies and of one of
# its extras: `hf` (what users need besides), `test` (what the tests need), or another one of pyproject.toml; `none`:
# without extras. Does nothing when that was already done for the same pyproject.toml and constraints.txt.
#   PYTHON=/path/to/python3.11   the Python to make it with (default: python3)
set -euo pipefail
extra=${1:---help}
if [ "$extra" = --help ] || [ "$extra" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [ $# -gt 0 ] && exit 0 || exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$extra" = none ]; then
    wanted=.
elif grep -q "^$extra = \[" pyproject.toml; then
    wanted=".[$extra]"
else
    echo "error: tools/venv.sh: got $extra, expected an extra of pyproject.toml; give hf or test" >&2
    exit 2
fi
stamp=.venv/installed-$extra-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is $("$python" --version 2>&1), Python 3.11 or later is needed; set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "installing into $PWD/.venv (once)"
# pip leaves compiling to the first import: that compiles what is imported, and pip all that is installed, for longer than the downloads take.
.venv/bin/python -m pip install --no-compile --progress-bar off --disable-pip-version-check --constraint constraints.txt --editable "$wanted" |
    sed -un 's/^ *Downloading \(.* ([^)]*)\)$/  downloading \1/p; s/^Installing collected packages:.*/  unpacking/p'
echo "installed in $SECONDS s"
touch "$stamp"
