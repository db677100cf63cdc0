"""What a rank uses, by meters of known numbers and by processes that use what is known."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tfdist.runs.meters import Reading
from tfdist.runs.resource_use import ResourceUse

# Holds so many bytes that were written to, computes for half a second, says so, and waits.
_CHILD = """
import time
held = b"x" * (100 << 20)
begun = time.process_time()
while time.process_time() - begun < 0.5:
    pass
print("used", flush=True)
time.sleep(60)
"""
# What a process with just that child tells of both: before it began, when it said so, after it.
_PARENT = """
import json, subprocess, sys
from tfdist.runs.resource_use import Processes, ResourceUse

use = ResourceUse([Processes()], interval_s=60)
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE) as child:
    use.take()
    child.stdout.readline()
    with_it = use.take()
    child.kill()
ended = use.take()
use.take()
print(json.dumps([with_it, ended, use.take()]))
"""


class _Meter:
    """Shows the next reading of a list each time; None raises."""

    def __init__(self, *readings: Reading | None):
        self._left = list(readings)
        self.has_ended = threading.Event()

    def read(self) -> Reading:
        reading = self._left.pop(0)
        if not self._left:
            self._left = [reading]
            self.has_ended.set()
        if reading is None:
            raise OSError("no such counter any more")
        return reading


def _use(*readings: Reading | None) -> ResourceUse:
    """Returns one that reads no more than it is asked to."""
    return ResourceUse([_Meter(*readings)], interval_s=60)


def test_levels_are_means_and_peaks_and_totals_are_differences():
    levels = [Reading({"gpu": gpu, "gpu_memory_mib": 8.0}, {}) for gpu in (0.25, 0.75)]
    use = _use(*levels)
    found = use.take()
    assert (found["gpu"], found["gpu_peak"]) == (0.5, 0.75)
    assert (found["gpu_memory_mib"], found["gpu_memory_peak_mib"]) == (8, 8)
    totals = [Reading({}, {"energy_rapl_j": joules}) for joules in (100.0, 130.0, 131.0)]
    use = _use(*totals)
    assert [use.take()["energy_rapl_j"] for _ in range(2)] == [30, 1]


def test_what_cannot_be_read_is_no_figure_and_no_error():
    reading = Reading({"memory_mib": 5.0}, {"energy_rapl_j": 1.0})
    use = _use(reading, None, reading)
    assert "energy_rapl_j" not in use.take()
    assert set(use.take()) == {"seconds", "memory_mib", "memory_peak_mib"}


def test_a_thread_samples_until_it_is_left_even_by_an_error():
    meter = _Meter(*(Reading({"memory_mib": float(n)}, {"cpu_s": n / 1e6}) for n in range(5)))
    use = ResourceUse([meter], interval_s=0.001)

    def broken_off() -> None:
        with use:
            assert meter.has_ended.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert "tfdist resources" not in {thread.name for thread in threading.enumerate()}
    assert use.take()["memory_peak_mib"] == 4


def test_children_count_while_they_live_and_their_time_after_it():
    command = [sys.executable, "-c", _PARENT, _CHILD]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
    with_it, ended, after = json.loads(done.stdout)
    assert with_it["cpu_cores"] * with_it["seconds"] > 0.4
    # Its half second is not told twice, nor taken back.
    assert 0 <= ended["cpu_cores"] * ended["seconds"] < 0.4
    assert with_it["memory_peak_mib"] - after["memory_peak_mib"] > 90
