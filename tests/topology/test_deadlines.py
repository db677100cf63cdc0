"""The deadlines that ranks hear of."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.launch import jobs
from tfdist.strategies import REGISTRY
from tfdist.topology import deadlines, tf_config
from tfdist.training.engine.options import deadline


def test_a_rank_gives_up_after_its_command():
    for stall in (5.0, 300.0, 1e4):
        told = deadlines.told(7.5, stall)
        assert deadlines.heard(told, "start_timeout_s") == 7.5
        assert deadlines.heard(told, "stall_timeout_s") >= max(stall + 60, 1.5 * stall)


def test_a_rank_that_is_told_nothing_waits_as_long_as_a_command_does():
    assert deadlines.heard({}, "start_timeout_s") == 120
    assert deadlines.heard(deadlines.told(7, None), "stall_timeout_s") == 300


def test_what_is_given_to_the_strategy_holds(monkeypatch):
    monkeypatch.setenv("TFDIST_STALL_TIMEOUT_S", "400.0")
    assert deadline("stall_timeout_s", None) == 400
    assert deadline("stall_timeout_s", 2) == 2
    with pytest.raises(OptionError, match="stall_timeout_s must be a number of seconds"):
        deadline("stall_timeout_s", 0)


# Slurm's srun and a TF_CONFIG of one's own have started the ranks; else tfdist does.
STARTED = {
    "tfdist": {},
    "tf_config": {
        "TF_CONFIG": tf_config([("worker", "a:1"), ("worker", "b:1")], 0),
    },
    "slurm": {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
    },
}


@pytest.mark.parametrize("launcher", STARTED)
@pytest.mark.parametrize("strategy", ["horovod", "multi_worker"])
def test_strategies_keep_to_what_their_command_was_given(strategy, launcher, monkeypatch):
    for name, value in STARTED[launcher].items():
        monkeypatch.setenv(name, value)
    job = jobs.job_for(strategy, ["x"], start_timeout_s=500, stall_timeout_s=140)
    for name, value in job.env.items():
        if name.startswith("TFDIST_"):
            monkeypatch.setenv(name, value)
    made = REGISTRY[strategy].load()()
    assert made._stall_timeout_s == 280
    assert getattr(made, "_start_timeout_s", 500) == 500
