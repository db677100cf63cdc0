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

.PHONY: setup demo quick test test-all lint bench docs

setup:
	@tools/setup.sh

demo: setup
	@bash examples/demo.sh

# A worker for each core, four at most: each holds TensorFlow, and starts processes that do. Tests that share an expensive set-up stay on one worker, in the order
# of tests/running_order.py. The last option wins: PYTEST_ARGS="-n 0" runs all in one process. What
# tests start keeps what Python has compiled even where the variable says otherwise.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
WORKERS := -n logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

# Every strategy, every verb, each fault once.
test: setup
	@$(PYTEST) $(WORKERS) -m "not long" $(PYTEST_ARGS)

# And the long tier: the full product of conformance, all notebooks, every kill, the hunts' seeds.
test-all: setup
	@$(PYTEST) $(WORKERS) $(PYTEST_ARGS)

# What reads the code and starts nothing: seconds.
quick: lint
	@$(PYTEST) -n 0 $(QUICK_TESTS)
TRUST := tests/faults/test_trust.py::test_
QUICK_TESTS := tests/test_layers.py tests/test_errors.py tests/test_names.py tests/tools/test_house.py \
	tests/test_types.py::test_a_type_checker_knows_every_name_and_no_other \
	$(TRUST)nothing_from_a_disk_is_unpickled $(TRUST)no_source_asks_for_a_shell \
	$(TRUST)the_one_that_reads_pickles_of_others_finds_only_its_own \
	$(TRUST)whoever_reads_files_refuses_code_in_them

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
