"""``tfdist aws cost``: money, time and carbon before a job is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.cli import voice
from tfdist.cli.aws_options import speed_options, with_config
from tfdist.cli.console import stdout
from tfdist.errors import OptionError
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from tfdist.aws.config import Config
    from tfdist.aws.cost import Estimate, Speed
    from tfdist.aws.instances import Instance, PriceTable

_EPILOG = """\b
Examples:
  tfdist aws cost --config mine.yaml --samples-per-s 5200
  tfdist aws cost --config mine.yaml --samples-per-s 1:5200 --samples-per-s 4:17000 --instances 16
  tfdist aws cost --config mine.yaml --measured runs/digits/metrics.json --json
"""


@click.command(
    "cost",
    cls=voice.Answering,
    short_help="Cost, time and carbon for 1..N instances.",
    epilog=_EPILOG,
)
@with_config
@speed_options
@click.option("--instances", type=click.IntRange(min=1), default=8, help="The most.")
def cost(config: Config, records: int | None, instances: int, **measured: Any) -> None:
    """Prints what the configured training costs on 1, 2, 4 ... instances.

    The speed must have been measured on the configured instance type, or the numbers are those of
    the machine it was measured on. Prices are on-demand, of computing alone; they and the factors
    of carbon are data files with a date. Spot prices and the seconds of a start are those that the
    configuration gives under cost, with their date.
    """
    speed = read_speed(config, **measured)
    if speed is None:
        raise OptionError(
            "costs must be computed from a measured speed",
            received="none",
            mend="Give --samples-per-s, or --measured with metrics.json of `tfdist train`",
        )
    show(config, speed, read_records(config, records), instances)


def before_start(config: Config, *, records: int | None, **measured: Any) -> None:
    """Prints what a start will cost: an estimate from a measured speed, and the most it can be."""
    from tfdist.aws.instances import CarbonTable

    training, carbon = config.training, CarbonTable.load()
    prices, instance = _instance(config)
    speed = read_speed(config, **measured)
    if speed is not None:
        show(config, speed, read_records(config, records), training.instance_count)
    jobs = 1 if config.tuning is None else config.tuning.max_jobs
    searched = f"{jobs} jobs of " if jobs > 1 else ""
    hours = training.max_run_s / 3600 * training.instance_count * jobs
    emitted = f", and of the carbon in {config.region} nothing is known"
    if config.region in carbon.kg_per_kwh:
        kilograms = hours * instance.watts / 1000 * carbon.factor(config.region)
        emitted = f" and {kilograms:.3f} kg CO2e"
    click.echo(
        f"training: {searched}{training.instance_count} x {instance.name}, at most "
        f"{training.max_run_s} s (max_run_s): at most {hours * instance.usd_per_hour:.2f} USD "
        f"on demand (prices of {prices.date}, {prices.region}){emitted}"
    )


def _instance(config: Config) -> tuple[PriceTable, Instance]:
    """Returns the price table, and its row of the training's instances."""
    prices = config.price_table
    return prices, prices[config.training.instance_type]


def read_speed(
    config: Config, *, speeds: tuple[str, ...], measured: Path | None, efficiency: float | None
) -> Speed | None:
    """Returns the measured speed of the options; None when there is none."""
    from tfdist.aws.cost import DEFAULT_EFFICIENCY, Speed, read_measurement

    found: dict[float, float] = {}
    if measured is not None:
        samples_per_s, replicas = read_measurement(measured)
        gpus = _instance(config)[1].gpus
        found[replicas / gpus if replicas and gpus else 1] = samples_per_s
    for text in speeds:
        count, _, speed = text.rpartition(":")
        try:
            instances, samples_per_s = int(count or 1), float(speed)
        except ValueError:
            raise OptionError(
                "--samples-per-s must be written as SPEED or INSTANCES:SPEED",
                received=repr(text),
                mend="Write --samples-per-s 1200, or 2:2300 of two instances",
            ) from None
        if instances in found:
            raise OptionError(
                "a speed must be given once for each number of instances",
                received=f"{found[instances]:g} and {samples_per_s:g} samples a second on "
                f"{instances}",
                mend="Leave one of them out, --measured too, or write 2:2300 of two instances",
            )
        found[instances] = samples_per_s
    return Speed(found, DEFAULT_EFFICIENCY if efficiency is None else efficiency) if found else None


def read_records(config: Config, records: int | None) -> int:
    """Returns the records of an epoch: as given, or as the manifest says."""
    if records is not None:
        return records
    if config.data.folder is None:
        raise OptionError(
            "the number of records must be given for shards that are not here",
            received=f"only data.source {config.data.source}",
            mend="Give --records",
        )
    from tfdist.aws.channels import check_has_train
    from tfdist.records.format.manifest import load_manifest

    splits = load_manifest(config.data.folder).splits
    check_has_train(splits)
    return splits["train"].records


def show(config: Config, speed: Speed, records: int, most: int) -> None:
    """Prints the estimates for 1, 2, 4 ... and ``most`` instances."""
    from tfdist.aws.cost import against_one, estimate, last_that_pays
    from tfdist.aws.instances import CarbonTable

    training, given, carbon = config.training, config.cost, CarbonTable.load()
    prices, instance = _instance(config)
    priced = f"on-demand prices of {prices.date} ({prices.region})"
    if training.spot and given.spot_usd_per_hour is not None:
        instance = dataclasses.replace(instance, usd_per_hour=given.spot_usd_per_hour)
        priced = f"spot price as the configuration gives it, of {given.date}"
    elif training.spot:
        priced += ", for no spot price is given as cost.spot_usd_per_hour"
    start = (
        f"{given.start_s:g} s of start-up, as of {given.date}" if given.start_s else "no start-up"
    )
    counts = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    estimates = [
        estimate(
            speed,
            count,
            records=records,
            epochs=training.epochs,
            instance=instance,
            carbon=carbon,
            region=config.region,
            start_s=given.start_s,
        )
        for count in counts
    ]
    best = last_that_pays(speed, most)
    more = against_one(estimates[0], estimates[-1])
    voice.answer(
        {
            "instance_type": training.instance_type,
            "region": config.region,
            "prices_of": prices.date,
            "priced": priced,
            "start_s": given.start_s,
            "carbon_of": carbon.date,
            "last_that_pays": best,
            "estimates": [dataclasses.asdict(item) for item in estimates],
            "last_against_one": more,
        }
    )
    gpus = f" ({instance.gpus} GPUs, all computing)" if instance.gpus > 1 else ""
    each = f", each of {config.tuning.max_jobs} trainings" if config.tuning else ""
    title = f"{instance.name}{gpus}, {records:,} records, {training.epochs} epochs{each}"
    numbers = ("instances", "samples/s", "s/epoch", "hours", "USD/epoch", "USD", "kg CO2e")
    table = table_of(title, (), numbers)
    for item in estimates:
        table.add_row(
            str(item.instances),
            f"{item.samples_per_s:,.0f}",
            f"{item.seconds_per_epoch:,.2f}",
            f"{item.hours:.4g}",
            f"{item.usd_per_epoch:.3g}",
            f"{item.usd:.3g}",
            "" if item.kg_co2 is None else f"{item.kg_co2:.3g}",
        )
    console = stdout()
    console.print(table)
    console.print(speed.describe())
    of_carbon = f"{carbon.source}, {config.region}, full load"
    if config.region not in carbon.kg_per_kwh:
        of_carbon = f"nothing is known of {config.region}"
    console.print(f"{priced}; {start}; computing alone; carbon: {of_carbon}")
    if most > 1:
        console.print(_before_and_after(estimates[0], most, more))
    least = "half of the speed of the first one"
    console.print(
        f"diminishing returns: each of {most} instances adds at least {least}"
        if best == most
        else f"diminishing returns: beyond {best} an added instance gives less than {least}"
    )


def _before_and_after(one: Estimate, most: int, more: dict[str, float]) -> str:
    units = {"hours": "hours", "usd": "USD", "kg_co2": "kg CO2e"}
    parts = [
        f"{abs(value):.3g} {units[name]} {'more' if value > 0 else 'less'}"
        + (f" ({value / before:+.0%})" if (before := getattr(one, name)) else "")
        for name, value in more.items()
    ]
    return f"{most} instances against 1: {', '.join(parts)}"
