# `make setup` first, or any of the others: they call it.
PYTHON ?= python3.11
export PYTHON
BIN := .venv/bin

.PHONY: setup demo test lint bench

setup:
	@tools/setup.sh

demo: setup
	@bash examples/demo.sh

# A worker for each core, four at most: each holds TensorFlow, and starts processes that do. A file
# stays on one worker, which runs its expensive fixtures once; tests/conftest.py orders the files.
# The last option wins: PYTEST_ARGS="-n 0" runs all in one process.
test: setup
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

bench: setup
	@$(BIN)/python -m benchmarks
