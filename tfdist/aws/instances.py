"""Instance types with their GPUs, prices and power; and the carbon of a region's electricity.

Both tables are data files with a date; that of instances may be replaced by one of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import DataError, OptionError, unknown_choice
from tfdist.planning.yaml_file import read_yaml

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance type.

    Attributes:
        usd_per_hour: on-demand price of training.
        watts: power at full load, an estimate.
    """

    name: str
    vcpus: int
    gpus: int
    usd_per_hour: float
    watts: float


@dataclass(frozen=True)
class PriceTable:
    """All instance types of one file, and the date of their prices."""

    date: str
    region: str
    instances: dict[str, Instance]

    @classmethod
    def load(cls, path: Path | None = None) -> PriceTable:
        """Reads ``path``, or tfdist's own table.

        Raises:
            DataError: not a table of this form.
        """
        value = read_yaml(path or TABLES / "instances.yaml")
        try:
            instances = {
                name: Instance(
                    name=name,
                    vcpus=int(row["vcpus"]),
                    gpus=int(row["gpus"]),
                    usd_per_hour=float(row["usd_per_hour"]),
                    watts=float(row["watts"]),
                )
                for name, row in value["instances"].items()
            }
            return cls(str(value["date"]), str(value["region"]), instances)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                "a price table must have date, region, and instances with vcpus, gpus, "
                "usd_per_hour, watts",
                received=f"an error in {path}: {error!r}",
                mend="Copy tfdist/aws/tables/instances.yaml and change it",
            ) from None

    def __getitem__(self, name: str) -> Instance:
        if name not in self.instances:
            known = unknown_choice("instance type", name, list(self.instances))
            raise OptionError(
                "an instance type must have a row in the price table",
                received=repr(name),
                mend=f"{known.mend}. For another one copy tfdist/aws/tables/instances.yaml, add it "
                "there, and give the file as `prices:`",
            )
        return self.instances[name]


@dataclass(frozen=True)
class CarbonTable:
    """kg CO2e of one kWh by region, and how much electricity a data centre needs beside."""

    date: str
    source: str
    power_usage_effectiveness: float
    kg_per_kwh: dict[str, float]

    @classmethod
    def load(cls) -> CarbonTable:
        """Reads tfdist's table."""
        value = read_yaml(TABLES / "carbon.yaml")
        return cls(**value | {"date": str(value["date"])})

    def factor(self, region: str) -> float:
        """Returns kg CO2e of one kWh of the instances, the data centre's share included.

        Raises:
            OptionError: the table knows no such region; see ``kg_per_kwh``.
        """
        if region not in self.kg_per_kwh:
            raise unknown_choice("region of the carbon table", region, list(self.kg_per_kwh))
        return self.kg_per_kwh[region] * self.power_usage_effectiveness


def device(instance_type: str) -> str:
    """Returns "gpu" of families of instances with GPUs: g4dn, g5, p3, p4d and so on; or "cpu"."""
    return "gpu" if instance_type.split(".")[1][:1] in ("g", "p") else "cpu"
