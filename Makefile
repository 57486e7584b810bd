# Two commands are all that is needed: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
# Threads that wait for each other without a rest make tiny models many times slower where others work too, so the demo's
# rest. One thread a test: tiny models are far slower with two threads on a busy machine. Nothing may be downloaded, and no
# graph that an earlier version compiled may be used.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_FORCE_DISABLE_CACHES=1

.PHONY: help setup demo test check kernels fix clean

help:  ## Show this help
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## Make .venv with the package and all that its tests need

$(RUNS): pyproject.toml constraints.txt
	@echo "Installing PyTorch and cable-attn into $(VENV): a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[plot]'
	@touch $@

$(READY): $(RUNS)
	@echo "Installing all that the tests need into $(VENV)"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(RUNS)  ## Train five encodings on short text and read 16 times further (CPU, minutes)
	OMP_WAIT_POLICY=passive $(BIN)/cable demo

test: setup  ## Run the tests (CPU)
	$(TEST_ENV) $(BIN)/pytest --numprocesses 2 --dist worksteal -rs

check: setup  ## Lint, format, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: setup  ## Compile every version of the kernels for every kind of GPU (no GPU needed, minutes)
	for generation in 80 90 100; do $(BIN)/python tests/compile_kernels.py $$generation --all || exit 1; done

fix: setup  ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
