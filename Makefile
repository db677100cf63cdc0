# `make setup` first, or any of the others: they call it.
#
# Two lanes: `modern` is today's TensorFlow, `classic` is TensorFlow 2.14 on Python 3.11. That of
# DEFAULT_LANE is in .venv, the other beside it: make test LANE=classic PYTEST_ARGS=tests/conformance
DEFAULT_LANE := modern
LANE ?= $(DEFAULT_LANE)
VENV := $(if $(filter $(DEFAULT_LANE),$(LANE)),.venv,.venv-$(LANE))
BIN := $(VENV)/bin
export LANE VENV PYTHON

.PHONY: setup demo test test-classic lint bench docs

setup:
	@tools/setup.sh

# One of the lanes; both side by side: make -j2 setup-modern setup-classic
setup-%:
	@$(MAKE) --no-print-directory setup LANE=$*

demo: setup
	@bash examples/demo.sh

# A worker for each core, four at most: each holds TensorFlow, and starts processes that do. A file
# stays on one worker, which runs its expensive fixtures once; tests/conftest.py orders the files.
# The last option wins: PYTEST_ARGS="-n 0" runs all in one process. The tests start a thousand
# processes, which keep what Python has compiled even where the variable says otherwise.
test: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder \
		$(PYTEST_ARGS)

# What an older TensorFlow could do otherwise: what differs, what engines compute, what is read. Larger
# models, what grids, pipelines and recompute do beside the rows of conformance, and how shards are
# written, are tested in the other lane alone.
CLASSIC_TESTS := tests/test_compat.py tests/test_environment.py \
	tests/conformance --ignore=tests/conformance/test_proof.py \
	tests/strategies --ignore=tests/strategies/test_grid.py --ignore=tests/strategies/pipeline \
	--ignore=tests/strategies/mesh/test_recompute.py \
	tests/records/reading tests/records/clients tests/records/test_round_trip.py
test-classic:
	@$(MAKE) --no-print-directory test LANE=classic PYTEST_ARGS="$(CLASSIC_TESTS) $(PYTEST_ARGS)"

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
