# `make setup` first, or any of the others: they call it.
PYTHON ?= python3.11
export PYTHON
BIN := .venv/bin

.PHONY: setup demo test lint bench

setup:
	@tools/setup.sh

demo: setup
	@bash examples/demo.sh

test: setup
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

bench: setup
	@$(BIN)/python -m benchmarks
