# `make demo` shows what vitflow does; `make test` checks that it does it. Both work from a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-lowest check install clean

demo: install
	$(BIN)/vitflow demo -o demo-output

# Two processes of one thread each: one with two threads leaves a core idle for much of the run.
test: install check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# The core tests with the oldest dependencies that pyproject.toml allows, in an environment that is removed afterwards.
test-lowest:
	$(PYTHON) -m tests.lower_bounds $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

# The environment is current when it was installed from this very pyproject.toml.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vitflow needs Python 3.11 or newer; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-lowest demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
