"""What a rank uses, by meters of known numbers and by processes that use what is known."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tfdist.runs.meters import Nvml, Rapl, Reading, Stated
from tfdist.runs.resource_use import Processes, ResourceUse

# Holds so many bytes that were written to, says so, computes until a line comes, and goes.
_CHILD = """
import sys, threading, time
held = b"x" * (100 << 20)
threading.Thread(target=lambda: sys.stdin.readline(), daemon=True).start()
begun = time.process_time()
while time.process_time() - begun < 0.5:
    pass
print("used", flush=True)
time.sleep(60)
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
    before = threading.active_count()
    use = ResourceUse([meter], interval_s=0.001)

    def broken_off() -> None:
        with use:
            assert meter.has_ended.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert threading.active_count() == before
    assert use.take()["memory_peak_mib"] == 4


def test_children_count_while_they_live_and_their_time_after_it():
    use = ResourceUse([Processes()], interval_s=60)
    command = [sys.executable, "-c", _CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        use.take()
        assert child.stdout.readline() == b"used\n"
        found = use.take()
        assert found["cpu_cores"] * found["seconds"] > 0.4
        held = found["memory_peak_mib"]
        child.kill()
    found = use.take()
    assert found["cpu_cores"] >= 0  # Its half second is not told twice, nor taken back.
    assert found["cpu_cores"] * found["seconds"] < 0.4
    use.take()
    assert held - use.take()["memory_peak_mib"] > 90


def _zone(folder, number: str, name: str, microjoules: int):
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir(exist_ok=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text("9999999\n")


def test_rapl_adds_packages_up_and_goes_on_where_a_counter_begins_anew(tmp_path):
    def set_to(first: int, second: int) -> None:
        for number, name, value in (
            ("0", "package-0", first),
            ("0:0", "core", 7),
            ("1", "package-1", second),
            ("2", "psys", first + second),
        ):
            _zone(tmp_path, number, name, value)

    set_to(1_000_000, 9_000_000)
    (meter,) = Rapl.found(tmp_path)
    set_to(3_000_000, 500_000)  # 2 J, and 1.5 J through the end of the counter.
    assert meter.read().totals == {"energy_rapl_j": pytest.approx(3.5)}
    set_to(3_250_000, 500_000)
    assert meter.read().totals == {"energy_rapl_j": pytest.approx(3.75)}


def test_rapl_that_cannot_be_read_is_none(tmp_path):
    assert not [*Rapl.found(tmp_path)]
    _zone(tmp_path, "0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    assert not [*Rapl.found(tmp_path)]


class _Library:
    """What ``pynvml`` shows of GPUs 2 and 3; the second one tells no energy."""

    NVMLError = RuntimeError

    def __init__(self, tells_energy: bool = True):
        self._tells_energy = tells_energy

    def nvmlDeviceGetUtilizationRates(self, device):
        return type("Rates", (), {"gpu": 10 * device})

    def nvmlDeviceGetMemoryInfo(self, device):
        return type("Memory", (), {"used": device * 2**20})

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        if not self._tells_energy:
            raise RuntimeError("Not Supported")
        return 1000 * device


def test_nvml_adds_the_gpus_of_a_rank_up():
    levels = {"gpu": pytest.approx(0.25), "gpu_memory_mib": 5}
    assert Nvml(_Library(), [2, 3]).read() == (levels, {"energy_nvml_j": 5})
    old = Nvml(_Library(tells_energy=False), [2, 3])
    assert old.read() == (levels, {})
    assert not old.has_energy
    assert not [*Nvml.found([])]


def test_stated_power_grows_with_time():
    meter = Stated(70)
    use = ResourceUse([meter], interval_s=60)
    threading.Event().wait(0.05)
    found = use.take()
    assert found["energy_stated_j"] == pytest.approx(70 * found["seconds"], rel=0.2)
