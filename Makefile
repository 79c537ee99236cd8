# Everything a fresh machine needs is python3 (3.11 to 3.13) and make: the first target creates its own .venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo
export OMP_NUM_THREADS ?= 1
export MPLBACKEND := Agg

.PHONY: help setup demo test check format schema clean
help:
	@echo "make demo    set up, then the whole loop on the tiny scenario: optimize, compare, simulate, execute, validate"
	@echo "make test    set up, then all tests"
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

demo: setup
	@$(BIN)/python -m mmplan.demo --out $(OUT)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

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
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
