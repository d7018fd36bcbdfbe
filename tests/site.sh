#!/usr/bin/env bash
# The documentation as a site, read in a real browser: Chromium without a screen. MkDocs is in an environment of its own (tools/site.sh), so
# every other test shows that nothing needs it. A machine without a browser gets Debian's, if the tests may install it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/venv.sh test
browser=$(command -v chromium chromium-browser google-chrome google-chrome-stable | head -n 1 || true)
if [ -z "$browser" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "error: tests/site.sh: got no browser, expected chromium or google-chrome on the path; install one (apt-get install chromium)" >&2
        exit 1
    fi
    echo "installing chromium (once)"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
export OMP_NUM_THREADS=1
.venv/bin/python -m pytest -m site tests/site "$@"
