"""Meters of energy and of GPUs, on counters whose numbers are known."""

from __future__ import annotations

import time

import pytest

from tfdist.runs import meters
from tfdist.runs.meters import Nvml, Rapl, Stated


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

    class Part(_Library):
        def nvmlDeviceGetUtilizationRates(self, device):
            raise RuntimeError("Not Supported")

    assert Nvml(Part(), [2, 3]).read() == ({"gpu_memory_mib": 5}, {"energy_nvml_j": 5})
    assert not [*Nvml.found([])]


def test_stated_power_grows_with_time(monkeypatch):
    meter = Stated(70)
    for now, joules in ((10.0, 700), (12.5, 875)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        assert meter.read().totals == {"energy_stated_j": joules}


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("", ["0", "1"]), ("3, GPU-5a,7", ["3", "GPU-5a"])]
)
def test_gpus_are_called_as_cuda_does(monkeypatch, visible, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [meters.cuda_name(f"/physical_device:GPU:{n}") for n in (0, 1)] == names
