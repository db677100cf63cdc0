"""fit, evaluate and predict on every strategy; the scenarios stand in fit_scenarios.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("fit_scenarios.py")
_NAMES = tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE))
# Steps on one device are Keras' own: what is left are the loops around them.
_OF_LOOPS = (
    "a_step_is_traced_once",
    "several_steps_per_execution",
    "compiled_by_xla",
    "unbatched_dataset",
    "batches_as_keras_takes_them",
    "arrays_as_keras_takes_them",
    "given_batches_are_resumed",
    "models_that_data_builds",
    "a_model_that_fails_in_its_call_stays_to_be_built",
    "no_epochs_and_more_fits",
    "compiled_anew_for_fine_tuning",
    "files_are_written_once",
    "callbacks_that_decide",
    "checkpoints_with_arrays",
    "saved_models_load",
    "refusals_say_what_to_do",
    "a_compiled_model_is_taken_as_it_is",
)
# What two processes must agree on, and what each has of its own.
_OF_PROCESSES = (
    "sum_reduction",
    "records_that_are_changed_at_random",
    "batches_padded_to_their_longest_record",
    "mask_on_the_output",
    "sparse_gradients_and_unused_weights",
    "mixed_precision",
    "a_loss_that_shows_nothing",
    "losses_that_couple_rows_are_named",
    "metrics_that_layers_add",
    "several_steps_per_execution",
    "a_step_is_traced_once",
    "unbatched_dataset",
    "batches_as_keras_takes_them",
    "ranks_that_read_other_records_are_told",
    "fewer_records_than_replicas",
    "arrays_as_keras_takes_them",
    "batches_are_taken_as_keras_takes_them",
    "given_batches_are_resumed",
    "models_that_data_builds",
    "ranks_that_read_other_batches_are_told",
    "no_epochs_and_more_fits",
    "files_are_written_once",
    "callbacks_that_decide",
    "a_stop_within_an_epoch_hangs_nobody",
    "checkpoints_with_arrays",
    "saved_models_load",
    "refusals_say_what_to_do",
)
_RUN = {"single": _OF_LOOPS, "mirrored": _NAMES, "horovod": _OF_PROCESSES}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return {
        "single": Job(_FILE, folder("single"), "single", only=_OF_LOOPS),
        "mirrored": Job(_FILE, folder("mirrored"), "mirrored", {"devices": 2}),
        "horovod": Job(
            _FILE,
            folder("horovod"),
            "horovod",
            {"stall_timeout_s": 20},
            ranks=2,
            only=_OF_PROCESSES,
        ),
    }


@pytest.mark.parametrize(
    ("strategy", "name"), [(strategy, name) for strategy, names in _RUN.items() for name in names]
)
def test_fit(strategy, name, jobs):
    jobs[strategy].check(name)
