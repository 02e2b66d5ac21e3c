#!/usr/bin/env bash
# Build the wheel and try it in a new environment without vLLM, as a user who only analyzes would have it.
# Usage: scripts/try_wheel.sh PYTHON.  Leaves the wheel in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
sample=$PWD/tests/docs/data/base
request=t1-0-b8265660
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT

say() { printf '[wheel %3ds] %s\n' "$SECONDS" "$*"; }
fail() {
    printf 'wheel: %s\n' "$1" >&2
    cat "$clean/out" >&2
    exit 1
}

# expect CODE PATTERN ARGUMENTS...: schedtrace exits with CODE and prints a line that matches PATTERN.
expect() {
    local code=$1 pattern=$2 got=0
    shift 2
    # Away from the clone: only what the wheel holds can be imported. -I: nor what the caller's environment names.
    (cd "$clean" && bin/python -I bin/schedtrace "$@") >"$clean/out" 2>&1 || got=$?
    [ "$got" = "$code" ] || fail "schedtrace $*: exit code $got, expected $code"
    grep -qE -- "$pattern" "$clean/out" || fail "schedtrace $*: nothing printed matches '$pattern'"
    say "schedtrace $*"
}

say "build"
rm -rf dist
"$python" -m venv "$clean"
pip=("$clean/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" wheel --no-deps --wheel-dir dist .
wheel=$(echo dist/schedtrace-*.whl)

say "install $wheel"
pip+=(install --no-compile) # most modules are never imported; Python compiles the others at their first import
"${pip[@]}" "$wheel"
version=$("$clean/bin/python" -Ic 'from importlib.metadata import version; print(version("schedtrace"))')
"$clean/bin/python" -Ic 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is not None)' ||
    fail "vLLM is installed: this is no clean environment"
ls "$clean"/lib/python*/site-packages/schedtrace-*.dist-info/licenses/LICENSE >"$clean/out" ||
    fail "the wheel lacks LICENSE"
ls "$clean"/lib/python*/site-packages/schedtrace/py.typed >"$clean/out" || fail "the wheel lacks py.typed"

expect 0 "^schedtrace $version\$" --version
expect 0 "KV cache space limits this run" demo demo
ls "$clean"/demo/report.html >"$clean/out" || fail "demo wrote no page"
expect 1 "vLLM is not installed" doctor
expect 0 "The client set the pace, not the scheduler" analyze "$sample"
expect 0 "\"code\": ?\"arrival-limited\"" analyze "$sample" --format json
expect 0 "^Step 1 " step "$sample" 1
expect 0 "$request" request "$sample" "$request"
expect 0 "." diff "$sample" "$sample"
expect 3 "300 steps are missing" export "$sample" --to parquet --output "$clean/tables"
ls "$clean"/tables/*.parquet >"$clean/out" || fail "export wrote no tables"
expect 2 "schedtrace\[perfetto\]" export "$sample" --to perfetto --output "$clean/viewer"
expect 0 "report.html" report "$sample" --output "$clean/report.html"
expect 0 "<!doctype html>" analyze "$sample" --format html
expect 0 "rank 0" watch "$sample" --once
expect 0 "^arrival-limited" findings
say "install the extras watch and perfetto"
"${pip[@]}" "$wheel[watch,perfetto]"
expect 3 "300 steps are missing" export "$sample" --to perfetto --output "$clean/viewer"
expect 2 "vLLM" replay "$sample"
expect 2 "vLLM" run --model anything
[ "$(wc -l <"$clean/out")" = 1 ] || fail "schedtrace run without vLLM: more than one line"
say "done: $wheel"
