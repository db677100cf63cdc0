"""What a training will cost: money, time and carbon for any number of instances.

From a measured speed. With one measurement the loss by adding instances is assumed; with several
it is fitted (Amdahl 1967: a part of each step that more instances do not shorten).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.aws.instances import CarbonTable, Instance
from tfdist.errors import DataError, OptionError, extra_module, read_json

# Of Horovod on two ranks of a small convnet, the least that tfdist's benchmarks allow.
DEFAULT_EFFICIENCY = 0.88
# An added instance that gives less than this share of the first one's speed does not pay.
_PAYS = 0.5


@dataclass(frozen=True)
class Speed:
    """Samples a second on any number of instances.

    Attributes:
        measured: number of instances -> samples a second; 0.25 for one of an instance's four GPUs.
        efficiency: of each doubling of the instances; used with a single measurement.
    """

    measured: Mapping[float, float]
    efficiency: float = DEFAULT_EFFICIENCY

    def __post_init__(self) -> None:
        numbers = (*self.measured, *self.measured.values())
        if not numbers or not all(0 < number < math.inf for number in numbers):
            raise OptionError(
                "a measured speed must be samples a second, above 0, of more than 0 instances",
                received=dict(self.measured),
                mend="Write for example --samples-per-s 2:9000, of two instances",
            )
        if not 0.5 < self.efficiency <= 1:
            raise OptionError(
                "the efficiency of a doubling must be above 0.5 and at most 1",
                received=self.efficiency,
                mend=f"Choose for example {DEFAULT_EFFICIENCY}",
            )

    def samples_per_s(self, instances: int) -> float:
        """Returns the speed on ``instances`` instances; measured numbers as they were fitted."""
        if len(self.measured) == 1:
            ((base, speed),) = self.measured.items()
            exponent = 1 + math.log2(self.efficiency)
            return speed * (instances / base) ** exponent
        divided, whole = self._fit()
        return 1 / (divided / instances + whole)

    def _fit(self) -> tuple[float, float]:
        """Returns the seconds of a sample that instances divide, and those that they do not."""
        import numpy as np

        scipy = extra_module("scipy.optimize", "scipy", "several speeds", "sagemaker")
        counts = np.array(list(self.measured), float)
        seconds = 1 / np.array(list(self.measured.values()))
        # Relative errors: a fast measurement counts as much as a slow one.
        matrix = np.stack([1 / counts, np.ones_like(counts)], axis=1) / seconds[:, None]
        (divided, whole), _ = scipy.nnls(matrix, np.ones_like(counts))
        return float(divided), float(whole)

    def describe(self) -> str:
        """Returns where the numbers come from, in a few words."""
        listed = ", ".join(f"{speed:,.0f} samples/s on {n:g}" for n, speed in self.measured.items())
        if len(self.measured) == 1:
            return f"measured: {listed}; assumed: {self.efficiency:.0%} efficiency a doubling"
        return f"measured: {listed}; fitted by Amdahl's law"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A training on one number of instances. Costs are of computing alone, its start included.

    Attributes:
        kg_co2: None where nothing is known of the region's electricity.
    """

    instances: int
    samples_per_s: float
    seconds_per_epoch: float
    hours: float
    usd_per_epoch: float
    usd: float
    kg_co2: float | None


def estimate(
    speed: Speed,
    instances: int,
    *,
    records: int,
    epochs: int,
    instance: Instance,
    carbon: CarbonTable,
    region: str,
    start_s: float = 0.0,
) -> Estimate:
    """Returns what ``epochs`` epochs of ``records`` records take on ``instances`` instances.

    Args:
        start_s: seconds before the first step, on each instance.
    """
    samples_per_s = speed.samples_per_s(instances)
    seconds = records / samples_per_s
    hours = (start_s + seconds * epochs) / 3600
    usd = hours * instances * instance.usd_per_hour
    kilowatt_hours = hours * instances * instance.watts / 1000
    return Estimate(
        instances=instances,
        samples_per_s=samples_per_s,
        seconds_per_epoch=seconds,
        hours=hours,
        usd_per_epoch=usd / epochs,
        usd=usd,
        kg_co2=kilowatt_hours * carbon.factor(region) if region in carbon.kg_per_kwh else None,
    )


def against_one(one: Estimate, many: Estimate) -> dict[str, float]:
    """Returns what ``many`` instances take more than ``one``; below 0 what they save."""
    names = [name for name in ("hours", "usd", "kg_co2") if getattr(one, name) is not None]
    return {name: getattr(many, name) - getattr(one, name) for name in names}


def last_that_pays(speed: Speed, most: int) -> int:
    """Returns the point of diminishing returns: the last instance, up to ``most``, that adds at
    least half of what the first one gives."""
    first = speed.samples_per_s(1)
    for count in range(2, most + 1):
        if speed.samples_per_s(count) - speed.samples_per_s(count - 1) < _PAYS * first:
            return count - 1
    return most


def read_measurement(path: Path) -> tuple[float, int]:
    """Returns samples a second, and the number of replicas, 0 where the file does not tell it.

    It is metrics.json of ``tfdist train`` or history.json of a job.

    Raises:
        DataError: neither of them.
    """
    try:
        value: Any = read_json(path.read_text())
        if isinstance(value, dict):
            return float(value["samples_per_s"]), int(value.get("replicas", 0))
        # The first epoch also traces the step.
        speeds = sorted(row["samples_per_s"] for row in value[1:] or value)
        return float(speeds[len(speeds) // 2]), 0
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            "a measurement must be metrics.json of `tfdist train`, or history.json of a training "
            "job",
            received=f"an error in {path}: {error!r}",
            mend="Give one of these files, or --samples-per-s",
        ) from None
