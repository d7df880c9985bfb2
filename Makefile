# Rollplex: `make help` lists the targets.

VENV ?= .venv
GOLDENS_VENV ?= .venv-goldens
PY := $(VENV)/bin/python
# The first Python of 3.11 or newer that can make a virtual environment.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
  if $$python -c 'import sys, ensurepip, venv; assert sys.version_info >= (3, 11)' \
  2>/dev/null; then command -v $$python; break; fi; done)
RUN_DIR ?= runs/quickstart
PYTEST := $(PY) -m pytest
# What `make test` leaves out; where its requirement is missing, a test skips.
SLOW := slow or gpu or real_model
# The slow tests run alone, for some of them measure.
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # Two installations into one environment would clash.
.PHONY: help venv quickstart quickstart-steps test test-slow test-all lint api \
  goldens bench gpu-check clean

help: ## Lists the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
	  sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 20

# The stamps make installation happen once, and again when a list changes.
$(VENV)/.runtime: requirements.txt
	@if [ -z "$(PYTHON)" ]; then \
	  echo "error: expected Python 3.11 or newer with venv (on Debian: apt-get" \
	    "install python3-venv), found none on PATH; or name one:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; fi
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing the run-time packages into $(VENV) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check \
	  -r requirements.txt
	@touch $@

$(VENV)/.test: requirements-test.txt $(VENV)/.runtime
	@echo "Installing the test packages into $(VENV) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check \
	  -r requirements.txt -r requirements-test.txt
	@touch $@

# jax's CUDA plugin; with it the tests compile for GPUs that are not there.
$(VENV)/.planner: requirements-planner.txt $(VENV)/.runtime
	@echo "Installing the compiler for NVIDIA GPUs into $(VENV) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check \
	  -r requirements.txt -r requirements-planner.txt
	@touch $@

venv: $(VENV)/.test $(VENV)/.planner ## Builds .venv with all that running and testing needs.

quickstart: $(VENV)/.runtime ## Trains a small policy to act in a world it sees.
	$(PY) -m experiments.quickstart --output_dir=$(RUN_DIR) --overwrite

quickstart-steps: $(VENV)/.runtime ## The same with a policy that acts step by step.
	$(PY) -m experiments.quickstart --step_by_step \
	  --output_dir=$(RUN_DIR)-steps --overwrite

test: venv ## Runs the fast tests (some 12 minutes on 2 cores, more the first time).
	$(PYTEST) -n $(WORKERS) -m "not ($(SLOW))"

test-slow: venv ## Runs the tests that `make test` leaves out.
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "$(SLOW)" || \
	  [ $$? -eq 5 ]  # 5: there are none.

test-all: test test-slow ## Runs every test (at most 30 minutes on 2 cores).

lint: $(VENV)/.test ## Checks style and likely mistakes.
	$(VENV)/bin/ruff check .

api: $(VENV)/.test ## Writes pages of all modules, from their docstrings, to build/api.
	$(PY) -m pdoc --docformat google --no-show-source \
	  --output-directory build/api rollplex_jax legolm_jax pallas_kernels

# The reference's video processor needs torchvision, which nothing else does.
goldens: ## Rebuilds the golden files (downloads 5 GB of torch and torchvision).
	@$(MAKE) --no-print-directory VENV=$(GOLDENS_VENV) $(GOLDENS_VENV)/.runtime
	$(GOLDENS_VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check torch==2.14.1 torchvision==0.29.1
	@for maker in tests/goldens/make_*.py; do \
	  echo "$$maker"; $(GOLDENS_VENV)/bin/python \
	    -m tests.goldens.$$(basename $$maker .py) || exit 1; done

bench: $(VENV)/.test ## Measures decoding against transformers.
	$(PY) -m experiments.bench --suite=decode

# Installs nothing: a GPU's machine may have a Python of its own (PY=python3).
gpu-check: ## Checks, times and tunes the kernels on a GPU, in about 4 minutes.
	$(PY) -m experiments.gpu_check --json=runs/gpu_check.json

clean: ## Removes caches and build output; keeps .venv and runs.
	rm -rf .cache .pytest_cache .ruff_cache build dist *.egg-info bazel-*
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
