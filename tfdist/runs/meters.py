"""What tells the energy and the GPUs of a rank: RAPL, NVML, or the stated power of a device."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_POWERCAP = Path("/sys/class/powercap")
_MIB = 2**20


class Reading(NamedTuple):
    """What a meter shows.

    Attributes:
        levels: such as bytes that are held now.
        totals: what only grows, such as joules; they begin anywhere.
    """

    levels: dict[str, float]
    totals: dict[str, float]


class Meter(Protocol):
    """Something that can be read at any time."""

    def read(self) -> Reading:
        """Raises whatever it likes where it cannot be read now."""


class Rapl:
    """The energy of a host's processor packages, by Intel's and AMD's counters.

    See the kernel's documentation, power/powercap/powercap: microjoules, which begin at 0 again
    after ``max_energy_range_uj``.
    """

    def __init__(self, packages: Sequence[Path]):
        self._packages = packages
        self._ranges = [_number(path / "max_energy_range_uj") for path in packages]
        self._last = self._counters()
        self._joules = 0.0

    @classmethod
    def found(cls, folder: Path = _POWERCAP) -> Iterator[Rapl]:
        """Gives it where this process may read the counters: often root alone may."""
        with contextlib.suppress(OSError, ValueError):
            zones = sorted(folder.glob("intel-rapl:*"))
            # Zones of cores and memory lie within a package; psys holds packages.
            packages = [
                zone for zone in zones if (zone / "name").read_text().startswith("package-")
            ]
            if packages:
                yield cls(packages)

    def read(self) -> Reading:
        counters = self._counters()
        passed = zip(counters, self._last, self._ranges, strict=True)
        # The file says the highest value, which is one below that of a whole round.
        self._joules += sum((now - before) % (most + 1) for now, before, most in passed) / 1e6
        self._last = counters
        return Reading({}, {"energy_rapl_j": self._joules})

    def _counters(self) -> list[int]:
        return [_number(path / "energy_uj") for path in self._packages]


class Nvml:
    """The GPUs of a rank, by NVIDIA's library: whoever uses them.

    Args:
        nvml: the module ``pynvml``, begun.
        devices: its handles.
    """

    def __init__(self, nvml: Any, devices: Sequence[Any]):
        self._nvml, self._devices = nvml, devices

    @classmethod
    def found(cls, names: Sequence[str]) -> Iterator[Nvml]:
        """Gives it where the package nvidia-ml-py is installed, and knows the GPUs.

        Args:
            names: numbers or UUIDs of GPUs, as in CUDA_VISIBLE_DEVICES.
        """
        if not names:
            return
        with contextlib.suppress(Exception):  # Whatever a driver raises.
            import pynvml

            pynvml.nvmlInit()
            if _may_be_another(pynvml, names):
                return
            by_number, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            devices = [by_number(int(n)) if n.isdigit() else by_uuid(n) for n in names]
            yield cls(pynvml, devices)

    @property
    def has_energy(self) -> bool:
        """Since Volta."""
        return "energy_nvml_j" in self.read().totals

    def read(self) -> Reading:
        """Returns what these GPUs tell: parts of one (MIG) do not tell all, old ones no energy."""
        nvml, devices = self._nvml, self._devices
        levels, totals = {}, {}
        with contextlib.suppress(nvml.NVMLError):
            shares = [nvml.nvmlDeviceGetUtilizationRates(each).gpu / 100 for each in devices]
            levels["gpu"] = sum(shares) / len(shares)
        with contextlib.suppress(nvml.NVMLError):
            held = sum(nvml.nvmlDeviceGetMemoryInfo(each).used for each in devices)
            levels["gpu_memory_mib"] = held / _MIB
        with contextlib.suppress(nvml.NVMLError):
            millijoules = sum(map(nvml.nvmlDeviceGetTotalEnergyConsumption, devices))
            totals["energy_nvml_j"] = millijoules / 1000
        return Reading(levels, totals)


class Stated:
    """What devices take at the power that ``planning/tables/devices.yaml`` states: full load."""

    def __init__(self, watts: float):
        self._watts = watts

    def read(self) -> Reading:
        return Reading({}, {"energy_stated_j": self._watts * time.monotonic()})


def of_rank(local_rank: int) -> list[Meter]:
    """Returns those that can be read here.

    Args:
        local_rank: of its host; the first one alone tells of the processors, which all share.
    """
    import tensorflow as tf

    from tfdist.planning.devices import DeviceTable

    found: list[Meter] = [*Rapl.found()] if local_rank == 0 else []
    gpus = tf.config.get_visible_devices("GPU")
    nvml = [*Nvml.found([cuda_name(gpu.name) for gpu in gpus])]
    found += nvml
    if gpus and not any(each.has_energy for each in nvml):
        details = map(tf.config.experimental.get_device_details, gpus)
        table = DeviceTable.load()
        watts = [table.watts_of(each.get("device_name", "")) for each in details]
        if None not in watts:
            found.append(Stated(sum(watts)))
    return found


def cuda_name(gpu: str) -> str:
    """Returns what CUDA_VISIBLE_DEVICES calls TensorFlow's "/physical_device:GPU:1"."""
    number = gpu.rpartition(":")[2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[int(number)].strip() if visible else number


def _may_be_another(nvml: Any, names: Sequence[str]) -> bool:
    """Whether a number may be of one GPU to CUDA, which begins with the fastest, and of another one
    to NVML, which goes by their places on the bus."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or not any(map(str.isdigit, names)):
        return False
    every = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return len({nvml.nvmlDeviceGetName(device) for device in every}) > 1


def _number(path: Path) -> int:
    return int(path.read_text())
