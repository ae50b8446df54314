# `make demo` and `make test` are the two to start with; both make the environment first, in .venv, once.
# `make test` leaves out what is slow or needs a real model; `make test-all` leaves out nothing.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# On Linux x86-64 mlx's CPU backend is several times faster on MKL than on the BLAS it comes with. Results do not need it.
MKL := $(CURDIR)/.venv/lib/libmkl_rt.so.3
PRELOAD := if [ -e "$(MKL)" ]; then export LD_PRELOAD="$(MKL)"; fi;

.PHONY: demo test test-all test-oldest test-vlm check lint types docs dist install bench bench-peers clean

demo: $(INSTALLED)
	@$(PRELOAD) $(BIN)/velox demo

# Tests of one file share what they have set up: files are dealt out whole. One worker: make test WORKERS=0
WORKERS ?= 2
FAST := -m "not slow and not real_model" -n $(WORKERS) --dist loadfile

test: $(INSTALLED)
	@$(PRELOAD) $(BIN)/pytest $(FAST)

test-all: $(INSTALLED)
	@$(PRELOAD) $(BIN)/pytest

# The fast tests with the lowest versions that pyproject allows of what Velox KV needs to run, in an environment of their own.
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.installed
	@$(PRELOAD) $(OLDEST)/bin/pytest $(FAST)

$(OLDEST)/.installed: pyproject.toml tests/packaging/lowest_bounds.py
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/pip install --quiet --disable-pip-version-check packaging
	@$(OLDEST)/bin/python tests/packaging/lowest_bounds.py > $(OLDEST)/lowest.txt
	@$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/lowest.txt -e '.[test]'
	@touch $@

# Vision models of mlx-vlm, which the other tests do not need, in an environment of their own.
VLM := .venv-vlm
test-vlm: $(VLM)/.installed
	@$(PRELOAD) $(VLM)/bin/pytest tests/vlm

$(VLM)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VLM)
	@$(VLM)/bin/pip install --quiet --disable-pip-version-check -e '.[test,vlm]'
	@touch $@

check: lint types test

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

# The site, in build/site. Strictly: a broken link or a missing reference fails.
docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

# What is published, in dist/.
dist: $(INSTALLED)
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# One thread for every BLAS: threads that spin on small matrices would count as work of whoever called them.
ONE_THREAD := MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

bench: $(INSTALLED)
	@$(PRELOAD) $(ONE_THREAD) $(BIN)/velox bench $(BENCH)

# The peer package lives in an environment of its own; both sides take turns within one run there.
PEERS := .venv-peers
bench-peers: $(PEERS)/.installed
	@$(PRELOAD) $(ONE_THREAD) $(PEERS)/bin/velox bench $(BENCH)

$(PEERS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install --quiet --disable-pip-version-check -e '.[plots]' veloxquant-mlx
	@touch $@

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Velox KV needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	@echo "Making the environment in .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-peers .venv-oldest .venv-vlm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
