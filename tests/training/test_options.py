"""The options of the train step: their values, and what they do on each engine.

The scenarios stand in options_scenarios.py.
"""

from __future__ import annotations

import pytest
from scenario_plugin import Job

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import OptionError
from tfdist.strategies import known_options, parse_options
from tfdist.training.engine.options import StepOptions, check_count, check_deadline, check_seed

SCENARIOS = "options_scenarios.py"
#: What is the same on every engine is tried on the quickest.
JOBS = {
    "single": Job("single", only_named=True),
    "mirrored": Job("mirrored", {"devices": 2}),
    "keras_3": Job("mirrored", {"devices": 2}, env={VARIABLE: "0"}, only_named=True),
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2, only_named=True),
    "multi_worker": Job("multi_worker", ranks=2, only_named=True),
}
_STEP = {"precision", "accumulate_steps", "recompute", "sync_batch_norm", "shard", "offload"}


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
        {"offload": "slots"},
        {"offload_dir": "/"},
        {"offload": "optimizer", "shard": "weights"},
        {"offload": "activations", "offload_dir": "no/such/folder"},
    ],
    ids=str,
)
def test_values_that_cannot_hold(options):
    with pytest.raises(OptionError):
        StepOptions(**options)


def test_slots_that_would_be_made_on_each_device_are_not_offloaded():
    with pytest.raises(
        OptionError, match=r"must have one replica in a process.*Choose strategy hor"
    ):
        tfdist.strategy("mirrored", offload=["activations", "optimizer"])


def test_on_the_command_line():
    pairs = ["recompute=none", "precision=mixed_float16", "sync_batch_norm=false"]
    options = StepOptions(**parse_options("mirrored", pairs))
    assert not options.recomputes
    assert not options.sync_batch_norm
    both = StepOptions(**parse_options("horovod", ["offload=optimizer,activations"]))
    assert both.offloads_slots
    assert both.offloads_activations
    named = StepOptions(**parse_options("mirrored", ["recompute=encoder1,encoder2"]))
    assert named.recomputed_layers == ("encoder1", "encoder2")
    assert StepOptions(recompute="blocks").recomputed_layers is None
    assert StepOptions(recompute=["a", "b"]).recomputed_layers == ("a", "b")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, "ten"])
def test_a_deadline_that_never_comes_is_none(seconds):
    with pytest.raises(OptionError, match="must be a number of seconds, at least 1"):
        check_deadline("stall_timeout_s", seconds)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, 2**31, pytest.param(2**3000, id="huge")])
def test_a_count_that_tensorflow_cannot_hold_is_none(count):
    with pytest.raises(OptionError, match="steps must be"):
        check_count("steps", count)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, None])
def test_a_seed_is_one_for_all_who_draw(seed):
    with pytest.raises(OptionError, match="from 0 to 4294967295"):
        check_seed(seed)


def test_on(scenario):
    scenario.check()
