# Everything runs in .venv, which is made and filled on first use. Needs python3 >= 3.11 and make.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(INSTALLED) ## make the virtual environment (the other targets do it themselves)

demo: $(INSTALLED) ## plan, emit and train a small GPT-2 over 4 local processes; compare with one
	$(BIN)/python examples/demo.py

test: lint ## ruff, mypy, then all tests on 2 processes
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## sort imports and apply ruff's safe fixes
	$(BIN)/ruff check --fix .

clean: ## remove the virtual environment and every cache
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "shardwright needs Python 3.11 or newer: none found on PATH." \
	  "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@
