# `make setup` first, or any of the others: they call it.
#
# Two lanes: `modern` is today's TensorFlow, `oldest` is TensorFlow 2.16 on Python 3.11, tried by hand.
# That of DEFAULT_LANE is in .venv, the other beside it:
# make test LANE=oldest PYTEST_ARGS="tests/conformance -k 'single or mirrored'"
DEFAULT_LANE := modern
LANE ?= $(DEFAULT_LANE)
VENV := $(if $(filter $(DEFAULT_LANE),$(LANE)),.venv,.venv-$(LANE))
BIN := $(VENV)/bin
export LANE VENV PYTHON

.PHONY: setup demo test lint bench docs

setup:
	@tools/setup.sh

demo: setup
	@bash examples/demo.sh

# A worker for each core, four at most: each holds TensorFlow, and starts processes that do. A file
# stays on one worker, which runs its expensive fixtures once; tests/conftest.py orders the files.
# The last option wins: PYTEST_ARGS="-n 0" runs all in one process. The tests start a thousand
# processes, which keep what Python has compiled even where the variable says otherwise.
test: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder \
		$(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

bench: setup
	@$(BIN)/python -m benchmarks

# A warning is an error, as a link that leads nowhere.
docs: setup
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs: docs/_build/index.html"
