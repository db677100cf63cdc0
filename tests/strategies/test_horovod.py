"""Horovod: its choices, and what only it has; the scenarios stand in horovod_scenarios.py."""

from __future__ import annotations

import pytest
from scenario_plugin import Job

from tfdist.errors import OptionError
from tfdist.strategies.horovod.strategy import _prepare_environment
from tfdist.strategies.rank_devices import choose_gpus, choose_threads
from tfdist.topology import Topology

SCENARIOS = "horovod_scenarios.py"
JOBS = {"horovod": Job("horovod", {"stall_timeout_s": 10}, ranks=2)}


def test_each_rank_pins_the_gpu_of_its_local_rank():
    gpus = ["/physical_device:GPU:0", "/physical_device:GPU:1"]
    assert [choose_gpus(gpus, rank) for rank in range(2)] == [gpus[:1], gpus[1:]]
    assert choose_gpus([], 5) == []
    with pytest.raises(OptionError, match=r"local rank 2 with 2 visible GPUs.*at most 2 workers"):
        choose_gpus(gpus, 2)


def test_a_rank_that_divides_a_model_pins_several_gpus():
    gpus = [f"/physical_device:GPU:{number}" for number in range(5)]
    assert [choose_gpus(gpus, rank, each=2) for rank in range(2)] == [gpus[:2], gpus[2:4]]
    assert choose_gpus([], 1, each=2) == []
    with pytest.raises(OptionError, match=r"2 GPUs of its own.*local rank 2.*at most 2 workers"):
        choose_gpus(gpus, 2, each=2)


def test_ranks_of_a_host_share_its_cores():
    assert choose_threads(8, bound=False, local_size=2) == 4
    assert choose_threads(4, bound=True, local_size=2) == 4
    assert choose_threads(2, bound=False, local_size=4) == 1


def test_what_the_user_has_set_stays():
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}
    _prepare_environment(environ, Topology(launcher="mpi", world_size=2), 60)
    assert environ == {
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    }
    alone: dict[str, str] = {}
    _prepare_environment(alone, Topology(), 60)
    assert alone["HOROVOD_CONTROLLER"] == "gloo"


def test_a_deadline_of_horovods_that_is_no_number_is_refused():
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5 min"}
    with pytest.raises(OptionError, match=r"SHUTDOWN_TIME_SECONDS must be a whole number .*5 min"):
        _prepare_environment(environ, Topology(), 60)


def test_on_two_ranks(scenario):
    scenario.check()
