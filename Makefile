# `make serve` and `make test` do all the set-up from nothing; a second call finds it done.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# First interpreter that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Which torch to install. On a machine without GPU a CPU build saves gigabytes: see README.md.
TORCH_SPEC ?= torch==2.13.0
# What the CUDA kernels are compiled for, as "80 90a"; "all" or "off"; empty: the machine's own GPUs.
CUDA_ARCHITECTURES ?=
MODEL ?=
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# Each stands for a step that was done: what serving needs, what tests and checks need besides, the native kernels.
DEPENDENCIES := $(VENV)/.dependencies-installed
DEVELOPMENT := $(VENV)/.development-installed
NATIVE := $(VENV)/.native-built
NATIVE_LOG := $(VENV)/native-build.log
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
# The stamp holds the choice that was built; another one that is asked for is built anew.
ifneq ($(CUDA_ARCHITECTURES),)
ifneq ($(CUDA_ARCHITECTURES),$(shell cat $(NATIVE) 2>/dev/null))
REBUILD := rebuild
endif
endif
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check
CLANG_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: rebuild help install develop demo-model serve test lint format protos bench clean

help:
	@echo "make serve [MODEL=...] [ARGS=...]  set up and serve; without MODEL the demo model"
	@echo "make test [ARGS=...]               set up and run the tests"
	@echo "make lint                          ruff, mypy, clang-format, protos"
	@echo "make format                        reformat Python and C++"
	@echo "make install                       set up what serving needs; CUDA_ARCHITECTURES=\"90a\" builds for other GPUs"
	@echo "make develop                       set up what tests and checks need as well"
	@echo "make demo-model | protos | bench | clean"

$(PY):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEPENDENCIES): pyproject.toml | $(PY)
	@echo "installing torch and what serving needs into $(VENV): some minutes, most of them downloads" >&2
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP_INSTALL) '$(TORCH_SPEC)'
	@$(PIP_INSTALL) 'scikit-build-core>=0.11' 'pybind11>=2.13' 'cmake>=3.22' ninja
	@$(PY) tools/install_dependencies.py all
	@touch $@

$(DEVELOPMENT): pyproject.toml $(DEPENDENCIES)
	@echo "installing what tests and checks need into $(VENV): a minute or two" >&2
	@$(PY) tools/install_dependencies.py dev
	@touch $@

# Of the build's long output its progress is shown, and all of its end where it fails.
$(NATIVE): $(DEPENDENCIES) $(NATIVE_SOURCES) $(REBUILD)
	@command -v c++ g++ clang++ >/dev/null || { echo "a C++ compiler is needed, such as g++ or clang++" >&2; exit 1; }
	@echo "building the native kernels: one to ten minutes, by the number of cores" >&2
	@set -o pipefail; options="$$($(PY) tools/cuda_build_options.py '$(CUDA_ARCHITECTURES)')" || exit 1; \
		PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --verbose --no-build-isolation --no-deps $$options \
		--editable . 2>&1 | tee $(NATIVE_LOG) \
		| { grep --line-buffered -oE '\[[0-9]+/[0-9]+\] .{0,90}' >&2 || true; } \
		|| { tail -n 40 $(NATIVE_LOG) >&2; echo "the build failed; all of it is in $(NATIVE_LOG)" >&2; exit 1; }
	@echo "$(CUDA_ARCHITECTURES)" > $@

install: $(NATIVE)

develop: install $(DEVELOPMENT)

demo-model: | $(PY)
	@$(PY) tools/fetch_demo_model.py

serve: install demo-model
	@exec $(VENV)/bin/pagemill serve $(MODEL) $(ARGS)

test: develop demo-model
	$(PY) -m pytest $(ARGS)

lint: develop
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CLANG_SOURCES)
	$(PY) tools/check_protos.py
	$(PY) tools/write_configuration_docs.py --check

format: develop
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(CLANG_SOURCES)

protos: $(DEVELOPMENT)
	PYTHON=$(PY) tools/gen_protos.sh

bench: develop demo-model
	$(PY) benchmarks/peers/run.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)
	find pagemill router scheduler worker -name '*.so' -delete
	rm -f worker/kernels/build_info.json
