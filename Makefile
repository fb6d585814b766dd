# Every target works from a fresh clone: it sets up .venv itself, and again when what .venv was made
# from changes.
#
#   make train ARGS="--help"      make test ARGS="-k pack"      make test-cuda drills mutants
#   make lint types docs bench figures wheels clean
#   make test-torch test-cuda VERSION=2.15.0

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test
.PHONY: train test test-cuda test-torch drills mutants lint types docs bench figures wheels clean

TORCH := torch==2.13.0
BUILD_TOOLS := 'pip>=25.1' 'setuptools>=77'  # pip: for dependency groups
ARGS :=

# The first interpreter on PATH that is new enough; empty if there is none.
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && { echo "$$python"; break; }; done)

PIP := .venv/bin/python -m pip install --disable-pip-version-check
NATIVE_SOURCES := $(shell find csrc -type f)

# Less than the other targets need, so that a first run starts sooner.
train: .venv/program
	.venv/bin/shardgrad train $(ARGS)

test: .venv/installed
	.venv/bin/python -m pytest $(ARGS)

# Of torch, where it is not the usual one.
VERSION :=

# torch.cuda without a GPU: see tests/cuda_runtime/README.md.
CUDA_TESTS := tests/cuda_runtime tests/gpu
CUDA_VENV := .venv-cuda$(addprefix -,$(VERSION))
test-cuda: $(CUDA_VENV)/ready
	$(CUDA_VENV)/bin/python -m pytest $(or $(ARGS),$(CUDA_TESTS))

# Never a file: the program finds out what is to be done. It needs nothing of .venv, so that both
# can be made at the same time.
.PHONY: $(CUDA_VENV)/ready
$(CUDA_VENV)/ready: python
	"$(PYTHON)" -m tests.cuda_runtime $(CUDA_VENV) $(addprefix --torch=,$(VERSION))

# What compares with FSDP2, under another version of torch; on the CPU, so without NVIDIA's
# libraries.
OTHER_TORCH := $(or $(VERSION),2.15.0)
OTHER := .venv-torch-$(OTHER_TORCH)
test-torch: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest $(or $(ARGS),tests/compat tests/features tests/engine/test_kept_programs.py)

drills: .venv/installed
	.venv/bin/python -m pytest -m long tests/drills $(ARGS)

mutants: .venv/installed
	.venv/bin/python -m tests.mutants $(ARGS)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/rumdl check --quiet .
	.venv/bin/lint-imports
	find csrc release tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
		| xargs .venv/bin/clang-format --dry-run -Werror

types: .venv/installed
	.venv/bin/python -m mypy

# Warnings are errors: a link or a reference that leads nowhere, a docstring that does not parse.
docs: .venv/installed
	rm -rf build/docs
	.venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/docs
	@echo "build/docs/index.html"

bench: .venv/installed
	.venv/bin/python -m benchmarks $(ARGS)

# All figures of README.md and benchmarks/README.md, at one commit on one machine, where nothing
# else may run. They take about half an hour on two cores. A figure counts only if the load was low
# before, so what is left of ours is waited for.
FIGURES := benchmarks/results/figures
QUIET := for i in {1..120}; do awk '{exit $$1 > 0.5}' /proc/loadavg && break; sleep 5; done
figures: .venv/installed .venv-cuda/ready
	@[[ -z "$$(git status --porcelain)" ]] || { \
		echo "make figures: a figure names a commit, and the tree has changes: commit them, or" \
			"put them away with git stash --include-untracked" >&2; exit 1; }
	rm -rf $(FIGURES)
	$(QUIET); .venv/bin/python -m benchmarks --out $(FIGURES) \
		training_step --preset tiny --preset small --ranks 2 --ranks 4 --batch-size 4 --seq-len 64 \
		--rounds 20 --limit-s 300 \
		training_step --preset tiny --precision bf16 --batch-size 4 --seq-len 64 --rounds 20 \
		--limit-s 300 \
		send_weights reading
	$(QUIET); .venv-cuda/bin/python -m benchmarks --out $(FIGURES) counts --ranks 2 --precision bf16 \
		--rounds 40
	rm -rf $(FIGURES)/logs $(FIGURES)/report.html
	.venv/bin/python -m benchmarks readme

wheels: .venv/torch
	.venv/bin/python release/wheels.py $(ARGS)

clean:
	rm -rf .venv .venv-* build *.egg-info shardgrad/_C.so .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: python
python:
	@[[ -n "$(PYTHON)" ]] || { \
		echo "shardgrad needs Python 3.11, 3.12 or 3.13 with its venv module, and there is none" \
			"on PATH: install one, or name it as in: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }

# Torch first and alone: building the ops needs it, so the project is installed without build
# isolation.
.venv/torch: Makefile | python
	@echo "shardgrad: setting up .venv with $(PYTHON), once; 2 to 5 minutes, most of them for PyTorch"
	"$(PYTHON)" -m venv .venv
	$(PIP) --quiet $(BUILD_TOOLS)
	$(PIP) $(TORCH)
	touch .venv/torch

.venv/program: .venv/torch pyproject.toml setup.py $(NATIVE_SOURCES)
	@echo "shardgrad: compiling the ops, about a minute"
	$(PIP) --no-build-isolation --editable '.[cli,plots]' '$(TORCH)'
	touch .venv/program

GROUPS := $(addprefix --group ,bench test lint docs clients)
.venv/installed: .venv/program
	@echo "shardgrad: installing what tests, checks and pages need"
	$(PIP) $(GROUPS) '$(TORCH)'
	touch .venv/installed

# The ops that .venv has compiled serve every version.
$(OTHER)/installed: Makefile tests/support/nvidia_stubs.py tests/cuda_runtime/build.py \
		| .venv/installed
	"$(PYTHON)" -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps torch==$(OTHER_TORCH)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check filelock \
		typing-extensions sympy networkx \
		jinja2 fsspec numpy 'setuptools>=77' pytest pytest-timeout hypothesis click rich
	$(OTHER)/bin/python -m tests.support.nvidia_stubs
	touch $@
