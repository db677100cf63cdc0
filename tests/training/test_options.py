"""The options of the train step: their values, and what they do on each engine.

The scenarios stand in options_scenarios.py.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies import known_options, parse_options
from tfdist.training.options import StepOptions

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("options_scenarios.py")
_NAMES = tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE))
_STEP = {"precision", "accumulate_steps", "recompute", "sync_batch_norm"}


@pytest.mark.parametrize("name", ["single", "mirrored", "horovod", "multi_worker"])
def test_strategies_that_divide_batches_have_them_all(name):
    assert set(known_options(name)) >= _STEP | {"lr_scaling", "warmup_epochs"}
    with pytest.raises(
        OptionError, match=r"precision must be a known one.*Choose one of float32, mixed_bfloat16"
    ):
        tfdist.strategy(name, precision="float16")


def test_other_strategies_have_what_they_can():
    for name in ("mesh", "pipeline"):
        assert "precision" in known_options(name)
        with pytest.raises(OptionError, match="precision must be a known one"):
            tfdist.strategy(name, precision="float16")
    with pytest.raises(OptionError, match=r"option of strategy 'mesh'.*'accumulate_steps'"):
        tfdist.strategy("mesh", accumulate_steps=2)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 0},
        {"accumulate_steps": 1.5},
        {"accumulate_steps": True},
        {"sync_batch_norm": "yes"},
        {"recompute": True},
        {"recompute": ["dense", 3]},
        {"precision": "mixed"},
    ],
    ids=str,
)
def test_values_that_cannot_hold(options):
    with pytest.raises(OptionError):
        StepOptions(**options)


def test_on_the_command_line():
    pairs = ["recompute=none", "precision=mixed_float16", "sync_batch_norm=false"]
    options = StepOptions(**parse_options("mirrored", pairs))
    assert not options.recomputes
    assert not options.sync_batch_norm
    named = StepOptions(**parse_options("mirrored", ["recompute=encoder1,encoder2"]))
    assert named.recomputed_layers == ("encoder1", "encoder2")
    assert StepOptions(recompute="blocks").recomputed_layers is None
    assert StepOptions(recompute=["a", "b"]).recomputed_layers == ("a", "b")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A strategy, and the scenarios that say most about it; ``mirrored`` has nearly all."""

    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    names: tuple[str, ...]


_ENGINES = {
    "single": Engine(
        names=(
            "microbatches_equal_one_batch",
            "microbatches_of_arrays_and_class_weights",
            "rows_that_are_missing_are_in_no_statistics",
            "a_step_of_ones_own_is_refused",
        )
    ),
    "mirrored": Engine(
        options={"devices": 2},
        names=tuple(
            name for name in _NAMES if name != "rows_that_are_missing_are_in_no_statistics"
        ),
    ),
    "horovod": Engine(
        options={"stall_timeout_s": 20},
        ranks=2,
        names=(
            "microbatches_of_masks_and_sparse_gradients",
            "clipped_tables_of_words_and_of_positions",
            "a_resumed_fit_of_microbatches",
            "statistics_of_each_replica",
            "what_overflows_on_one_replica_updates_none",
            "recomputed_activations_equal_kept_ones",
        ),
    ),
    "multi_worker": Engine(
        ranks=2,
        names=(
            "microbatches_are_normalized_over_all_replicas",
            "what_overflows_on_one_replica_updates_none",
        ),
    ),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {
        name: Job(
            _FILE,
            tmp_path_factory.mktemp(name),
            name,
            engine.options,
            ranks=engine.ranks,
            only=engine.names,
        )
        for name, engine in _ENGINES.items()
    }


@pytest.mark.parametrize(
    ("strategy", "name"), [(s, name) for s, engine in _ENGINES.items() for name in engine.names]
)
def test_on(strategy, name, jobs):
    jobs[strategy].check(name)
