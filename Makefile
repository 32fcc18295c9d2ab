# make demo   sets up .venv and answers configs/demo.jsonl with the bundled checkpoint
# make test   style, types and tests;  make test-slow: the slow tests too;  make check: style and types only
# make test-gpu   the kernels on this machine's Hopper GPU, beside the reference (needs one)
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu check

PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
# Tests of one file share compiled steps, hence loadfile. Two workers: each holds about 1 GB.
JOBS := 2

help:
	@sed -n '1,3s/^# //p' Makefile

demo: $(INSTALLED)
	@mkdir -p build
	$(PYTHON) -m di_jax.run generate --config quickstart.yaml --input configs/demo.jsonl > build/demo-answers.jsonl
	@echo 'the answers as JSON lines: build/demo-answers.jsonl'

test: check
	$(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile

test-slow: check
	$(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile -m ''

# In one process: each would take most of the GPU's memory.
test-gpu: $(INSTALLED)
	@$(PYTHON) -c 'import sys; from kernels_pallas.hopper import unavailable; \
	  why = unavailable(); sys.exit(why and f"no kernel to test here: {why}")' || { \
	  echo "The backend of an NVIDIA machine: $(PYTHON) -m pip install -c constraints.txt -e '.[cuda13,test]'" >&2; exit 1; }
	$(PYTHON) -m pytest -q -rs -m '' tests/kernels/*/test_*_on_hopper.py

check: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# A python3.x on PATH may be a pyenv shim that runs nothing, and a distribution's may lack venv: hence the trial.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@if ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  for candidate in python3.14 python3.13 python3.12 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python; do \
	    if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No Python >= 3.12 with the venv module was found.' >&2; \
	    echo 'Install one, then run make again: "apt install python3.12 python3.12-venv", "brew install python@3.12",' >&2; \
	    echo '"pyenv install 3.12", or "uv venv --seed --python 3.12 .venv".' >&2; \
	    exit 1; \
	  fi; \
	  echo "creating .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo 'installing di-jax and its dependencies into .venv (a few minutes the first time)'
	@PYTHONWARNINGS=ignore $(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
