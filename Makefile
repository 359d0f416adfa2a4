# `make demo` shows what vitflow does; `make test` checks that it does it. Both work from a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all coverage test-processors test-lowest check dist docs install clean

demo: install
	$(BIN)/vitflow demo -o demo-output

# Two processes of one thread each: one with two threads leaves a core idle for much of the run. What Python compiles
# is kept, or each of the processes that the tests start would compile it anew.
test: install check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# Also what is marked as slow: every family of timm, the notebooks, and flow at full depth.
test-all: PYTEST_ARGS += -m ""
test-all: test

# Which lines and branches the tests run: a table, and coverage.xml.
coverage: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	  --cov --cov-report=term:skip-covered --cov-report=xml $(PYTEST_ARGS)

# The tests as other processors, without wide vectors or with other sums of products, would round in them. A processor
# that cannot do what a setting asks for does what it can.
OLD_PROCESSOR := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Haswell OMP_NUM_THREADS=1
AVX2_PROCESSOR := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Zen OMP_NUM_THREADS=2

test-processors: install
	@failed=; for settings in "$(OLD_PROCESSOR)" "$(AVX2_PROCESSOR)"; do \
	  echo "== $$settings"; \
	  env $$settings HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS) || \
	    failed="$$failed== failed: $$settings\n"; \
	done; printf "$${failed:-== passed with each of these settings\n}"; test -z "$$failed"

# The core tests with the oldest dependencies that pyproject.toml allows, then with some in between, each in an environment
# that is removed afterwards.
test-lowest:
	$(PYTHON) -m tools.lower_bounds $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.option_types
	$(BIN)/python -m tools.functions

# The source distribution and the wheel, checked, and tried without network in an empty environment of each Python.
PYTHONS ?= $(PYTHON)

dist: install
	$(BIN)/python -m pip install --quiet --editable . --group dist
	$(BIN)/python -m tools.package $(foreach python,$(PYTHONS),--python $(python))

# The site of the documentation, without network: docs/_build/html/index.html. A warning is an error.
docs: install
	$(BIN)/python -m pip install --quiet --editable . --group docs
	$(BIN)/python -m sphinx -q -b html -W --keep-going -d docs/_build/doctrees docs docs/_build/html

install: $(STAMP)

# The environment is current when it was installed from this very pyproject.toml.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vitflow needs Python 3.11 or newer; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group test
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-lowest demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache docs/_build .coverage coverage.xml
