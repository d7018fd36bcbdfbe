#!/usr/bin/env bash
# usage: bash tools/package.sh [FOLDER]
#
# Build the sdist and, from it, the wheel of the tree as it stands, into FOLDER (default: dist), with the tested versions of
# the build's own packages. The version is what git's tags say: megatron_llama/config/version.py. At a tag, docs/CHANGELOG.md
# has to have a section for it. Nothing is uploaded.
#   PYTHON=/path/to/python3.11   the Python to build with (default: python3)
set -euo pipefail
if [ $# -gt 1 ] || [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [ $# -eq 1 ] && exit 0 || exit 2
fi
mkdir -p "${1:-dist}"
out=$(cd "${1:-dist}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
version=$("$python" -c 'import megatron_llama; print(megatron_llama.__version__)')
case $version in
*dev*) ;;
*)
    grep -q "^## ${version//./\\.} " docs/CHANGELOG.md || {
        echo "error: docs/CHANGELOG.md: got no section for $version, expected '## $version (DATE)'; write it and tag again" >&2
        exit 1
    }
    ;;
esac
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
# pip reads it in the environments that `build` makes as well: so setuptools is the tested one.
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
"$work/venv/bin/python" -m pip install --quiet build
"$work/venv/bin/python" -m build --outdir "$work/dist" . >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
mv "$work"/dist/* "$out"
ls -1 "$out"/megatron_llama-"$version"*
