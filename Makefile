# `make serve` and `make test` do all the set-up from nothing; a second call finds it done.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# First interpreter that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Which torch to install. On a machine without GPU a CPU build saves gigabytes: see README.md.
TORCH_SPEC ?= torch==2.13.0
MODEL ?=
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
DEPENDENCIES := $(VENV)/.dependencies-installed
NATIVE := $(VENV)/.native-built
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
CLANG_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help install demo-model serve test lint format protos bench clean

help:
	@echo "make serve [MODEL=...] [ARGS=...]  set up and serve; without MODEL the demo model"
	@echo "make test [ARGS=...]               set up and run the tests"
	@echo "make lint                          ruff, mypy, clang-format, protos"
	@echo "make format                        reformat Python and C++"
	@echo "make install | demo-model | protos | bench | clean"

$(PY):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEPENDENCIES): pyproject.toml | $(PY)
	@echo "installing dependencies into $(VENV)" >&2
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install --quiet '$(TORCH_SPEC)'
	$(PY) -m pip install --quiet 'scikit-build-core>=0.11' 'pybind11>=2.13' 'cmake>=3.22' ninja
	$(PY) tools/install_dependencies.py dev
	@touch $@

$(NATIVE): $(DEPENDENCIES) $(NATIVE_SOURCES)
	@command -v c++ g++ clang++ >/dev/null || { echo "a C++ compiler is needed, such as g++ or clang++" >&2; exit 1; }
	@echo "building the native kernels" >&2
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

install: $(NATIVE)

demo-model: | $(PY)
	@$(PY) tools/fetch_demo_model.py

serve: install demo-model
	@exec $(VENV)/bin/pagemill serve $(MODEL) $(ARGS)

test: install demo-model
	$(PY) -m pytest $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CLANG_SOURCES)
	$(PY) tools/check_protos.py
	$(PY) tools/write_configuration_docs.py --check

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(CLANG_SOURCES)

protos: $(DEPENDENCIES)
	PYTHON=$(PY) tools/gen_protos.sh

bench: install demo-model
	$(PY) benchmarks/peers/run.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)
	find pagemill router scheduler worker -name '*.so' -delete
