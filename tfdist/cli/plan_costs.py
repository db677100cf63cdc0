"""Money and carbon of the devices of ``tfdist plan``: the tables of ``tfdist aws cost``."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.aws.instances import CarbonTable, PriceTable
from tfdist.planning.devices import Cluster

_ROWS = 1e6


@dataclass(frozen=True)
class Costs:
    """What an hour of a host costs.

    Attributes:
        usd_per_hour: None where no price is known.
        kg_co2_per_hour: None where its power is not known.
        sources: lines that say where both come from.
    """

    usd_per_hour: float | None
    kg_co2_per_hour: float | None
    sources: tuple[str, ...]

    def of_rows(self, hosts: int, rows_per_s: float) -> dict[str, float | None]:
        """Returns what a million rows cost on so many hosts."""
        hours = hosts * _ROWS / rows_per_s / 3600
        each = {
            "usd_per_million_rows": self.usd_per_hour,
            "kg_co2_per_million_rows": self.kg_co2_per_hour,
        }
        return {name: None if rate is None else rate * hours for name, rate in each.items()}


def costs_of(cluster: Cluster, usd_per_hour: float | None, region: str) -> Costs:
    """Returns the costs of a host.

    Args:
        usd_per_hour: as given, such as a spot price; None: on demand, as the table says.

    Raises:
        OptionError: the carbon table has no such region.
    """
    prices, carbon = PriceTable.load(), CarbonTable.load()
    factor = carbon.factor(region)
    name = f"ml.{cluster.instance}"
    row = prices.instances.get(name)
    given = [f"price: given, {usd_per_hour:g} USD an hour for a host"] if usd_per_hour else []
    if row is None:
        unknown = "of price and power" if usd_per_hour is None else "of power"
        lines = [f"costs: {unknown} nothing is known here; name a host of AWS, as p5.48xlarge:1"]
        return Costs(usd_per_hour, None, (*given, *lines))
    lines = [
        f"price: {name} on demand, {row.usd_per_hour:g} USD an hour in {prices.region}, of "
        f"{prices.date}"
    ]
    watts = (
        f"carbon: {row.watts:g} W of {name} at full load, an estimate, {carbon.source}, {region}"
    )
    kilograms = row.watts / 1000 * factor
    return Costs(usd_per_hour or row.usd_per_hour, kilograms, (*(given or lines), watts))
