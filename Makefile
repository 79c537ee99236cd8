# Everything a fresh machine needs is python3 (3.11 to 3.13) and make: the first target creates its own .venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INTEROP := .venv-interop
GPU_VENV := .venv-gpu
OUT ?= out/demo
export OMP_NUM_THREADS ?= 1
export MPLBACKEND := Agg

.PHONY: help setup demo test test-plans interop test-interop gpu-check check format schema clean
help:
	@echo "make demo    set up, then the whole loop on the tiny scenario: optimize, compare, simulate, execute, validate"
	@echo "make test    set up, then all tests"
	@echo "make test-plans  set up, then the whole matrix of plans against one process, of which make test leaves mixtures out"
	@echo "make test-interop  set up the parsers of other frameworks, then the tests that feed them what mmplan exports"
	@echo "make gpu-check  train, calibrate, predict and validate on one CUDA device with the torch that is there; 8 minutes"
	@echo "make check   set up, then lint, format, types and the architecture test"
	@echo "make format  rewrite the sources in the house format"
	@echo "make schema  rewrite docs/scenario.schema.json"
	@echo "make clean   remove .venv and everything generated"

setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "mmplan needs Python 3.11 to 3.13 on PATH, found: $$(python3 --version 2>&1)"; exit 2; }
	@echo "set-up: $(PYTHON) -> $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 has no venv module: install it (Debian: apt-get install python3-venv)"; exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[run,dev]"
	@touch $@

# The whole loop on a model that trains here in seconds. The rehearsal plays 8 ranks with sleeps, so its bubbles can be
# checked on any number of cores; real computes on shared cores are compared in bytes, memory and losses.
demo: setup
	@mkdir -p $(OUT)
	$(BIN)/mmplan optimize scenarios/tiny.yaml -o $(OUT)/best.plan.json --explain
	$(BIN)/mmplan optimize scenarios/tiny.yaml -o $(OUT)/naive.plan.json --naive
	$(BIN)/mmplan compare $(OUT)/best.plan.json $(OUT)/naive.plan.json --html $(OUT)/compare.html
	$(BIN)/mmplan simulate $(OUT)/best.plan.json --plot $(OUT)/gantt.png --trace $(OUT)/trace.json
	$(BIN)/mmplan check $(OUT)/best.plan.json
	$(BIN)/mmplan execute $(OUT)/best.plan.json --local 4 --steps 10 -o $(OUT)/run.json
	$(BIN)/mmplan validate $(OUT)/best.plan.json $(OUT)/run.json --html $(OUT)/validation.html
	$(BIN)/mmplan optimize scenarios/tiny-rehearsal.yaml -o $(OUT)/rehearsal.plan.json
	$(BIN)/mmplan execute $(OUT)/rehearsal.plan.json --local 8 --rehearse --steps 5 -o $(OUT)/rehearsal.json
	$(BIN)/mmplan validate $(OUT)/rehearsal.plan.json $(OUT)/rehearsal.json --html $(OUT)/rehearsal.html
	@echo
	@echo "plans side by side:      $(abspath $(OUT))/compare.html"
	@echo "measured and predicted:  $(abspath $(OUT))/validation.html"
	@echo "rehearsal of 8 ranks:    $(abspath $(OUT))/rehearsal.html"

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -rs

# Of the matrix of plans against one process also those that mix what others have one by one: three minutes.
test-plans: setup
	MMPLAN_EVERY_PLAN=1 $(BIN)/python -m pytest tests/runtime/test_tensor_plans.py tests/runtime/test_job_plans.py

# The parsers of Megatron, torchtitan, DeepSpeed, Accelerate, JAX and Kubernetes, without CUDA; Slurm's controller only
# where apt can install it. About a minute and 2.3 GB.
interop: $(INTEROP)/.installed
$(INTEROP)/.installed: pyproject.toml constraints.txt $(wildcard interop*.txt)
	@test -n "$(PYTHON)" || { echo "mmplan needs Python 3.11 to 3.13 on PATH, found: $$(python3 --version 2>&1)"; exit 2; }
	@echo "set-up: $(PYTHON) -> $(INTEROP) (about a minute)"
	@$(PYTHON) -m venv $(INTEROP)
	@$(INTEROP)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -r interop.txt -e ".[dev]"
	@$(INTEROP)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
		--ignore-requires-python -r interop-alone.txt
	@$(INTEROP)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(INTEROP)/older \
		-r interop-older.txt
	@$(INTEROP)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
		--target $(INTEROP)/transformers -r interop-transformers.txt
	@if ! command -v slurmctld > /dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		{ apt-get update && apt-get install -y --no-install-recommends slurm-client slurmctld; } > $(INTEROP)/apt.log 2>&1 \
		|| echo "Slurm's controller could not be installed, see $(INTEROP)/apt.log: its test is left out"; fi
	@touch $@

test-interop: interop
	$(INTEROP)/bin/python -m pytest tests/interop -m interop --interop -rs

# Where there is a GPU, with the torch of PYTHON (`make gpu-check PYTHON=/opt/torch/bin/python3`): its packages are seen
# from an environment that adds what mmplan lacks, without the versions pinned here; where it has no torch, the newest
# comes from the registry. Nothing is installed where PYTHON has all of it.
gpu-check: $(if $(wildcard /dev/nvidia0 /dev/kfd),$(GPU_VENV)/.installed,setup)
	PYTHONPATH=$(CURDIR) $(if $(wildcard /dev/nvidia0 /dev/kfd),$(GPU_VENV),$(VENV))/bin/python benchmarks/gpu_check.py

$(GPU_VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "mmplan needs Python 3.11 to 3.13 on PATH, found: $$(python3 --version 2>&1)"; exit 2; }
	@echo "set-up: $(PYTHON) -> $(GPU_VENV)"
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(PYTHON) -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
		> $$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth
	@$(GPU_VENV)/bin/python -c 'import torch, ortools, pydantic, typer, yaml, networkx, matplotlib, rich' 2> /dev/null || \
		$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
			"$$($(GPU_VENV)/bin/python -c 'import torch' 2> /dev/null && echo . || echo '.[run]')"
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: setup
	$(BIN)/mmplan schema > docs/scenario.schema.json

clean:
	rm -rf $(VENV) $(INTEROP) $(GPU_VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
