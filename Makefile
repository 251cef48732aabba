# `make check` installs and runs everything; the rest are parts of it for daily work.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: check lint types test pair format
check: $(VENV)/.installed
	@$(MAKE) --no-print-directory lint types test pair

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

lint types test pair format: $(VENV)/.installed

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

test:
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

# The real default pair: pulls 1.6 GB and converts it the first time.
pair:
	$(BIN)/python -m pytest -q -m pair

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
