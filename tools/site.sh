#!/usr/bin/env bash
# usage: bash tools/site.sh [FOLDER] | --serve
#
# Build the documentation as a site: docs/, README.md and examples/, with search and with pictures of real plans. It goes into
# FOLDER (default: build/site), in the place of an earlier site; open index.html there in a browser. A broken link ends the build.
# With --serve the site is at http://127.0.0.1:8000 instead, and follows what you write. MkDocs is installed into .venv/site, once.
#   SITE_ADDRESS=127.0.0.1:9000  where --serve shows it
#   PYTHON=/path/to/python3.11   the Python to make that environment with (default: python3)
set -euo pipefail
if [ $# -gt 1 ] || [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [ $# -eq 1 ] && exit 0 || exit 2
fi
case ${1:-} in
--serve) ;;
-*)
    echo "error: tools/site.sh: got $1, expected a folder or --serve" >&2
    exit 2
    ;;
esac
target=$(realpath --canonicalize-missing -- "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/site}")
# MkDocs removes everything in the folder first.
if [ -e "$target" ] && [ ! -e "$target/assets/iframe-worker.js" ] && [ -n "$(ls -A "$target")" ]; then
    echo "error: tools/site.sh: got $target, expected a new or an empty folder, or an earlier site; name another one" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The commands that draw the pictures need numpy of what training needs, and no torch.
packages=(mkdocs-material numpy)
stamp=.venv/site/installed-$(cat constraints.txt tools/site.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    echo "installing ${packages[*]} into $PWD/.venv/site (once)"
    rm -rf .venv/site
    "${PYTHON:-python3}" -m venv .venv/site
    .venv/site/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "${packages[@]}"
    touch "$stamp"
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NO_MKDOCS_2_WARNING=true
if [ "${1:-}" = --serve ]; then
    exec .venv/site/bin/python -m mkdocs serve --dev-addr "${SITE_ADDRESS:-127.0.0.1:8000}" --config-file tools/docs_site/mkdocs.yml
fi
.venv/site/bin/python -m mkdocs --quiet build --strict --clean --config-file tools/docs_site/mkdocs.yml --site-dir "$target"
echo "open $target/index.html"
