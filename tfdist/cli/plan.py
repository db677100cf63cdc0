"""``tfdist plan``: what a model needs on some devices, and what to train it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tfdist.aws.instances import CarbonTable, PriceTable
from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import options_of, others_than, plot_option
from tfdist.cli.process_options import optional_model_option
from tfdist.errors import OptionError, spelt
from tfdist.planning.devices import Cluster, DeviceTable
from tfdist.planning.placement import Ending, Placement, place, read_jobs, when_ended
from tfdist.planning.plan import Row
from tfdist.planning.report import Plan
from tfdist.records.report_text import table_of
from tfdist.runs.planning import Check, check_plan, plan, refuse_other_devices
from tfdist.runs.settings import OfLearning

_EPILOG = """\b
Examples:
  tfdist plan --model model.py:model_fn --devices cpu:2
  tfdist plan --model model.py:model_fn --devices h100:8 --global-batch-size 512
  tfdist plan --model model.py:model_fn --devices a10g:2x4 --plot plan.png
  tfdist plan --model model.py:model_fn --devices g5.12xlarge:4 --usd-per-hour 3.40
  tfdist plan --model model.py:model_fn --devices cpu:2 --profile data/digits
  tfdist plan --model model.py:model_fn --devices cpu:2 --check
  tfdist plan --model model.py:model_fn --devices mine:8 --device-file mine.yaml
  tfdist plan --jobs jobs.yaml
"""


@click.command("plan", epilog=_EPILOG)
@optional_model_option
@click.option(
    "--devices",
    metavar="NAME:HOSTSxDEVICES",
    help="h100:8 is one host with eight; a10g:2x4 are two hosts with four each; p4d.24xlarge:2 two "
    "hosts of AWS; cpu:2 two halves of this machine. An unknown name lists all.",
)
@options_of(OfLearning, "global_batch_size")
@click.option(
    "--device-file",
    type=click.Path(path_type=Path),
    help="YAML of devices, links and instances of your own, beside tfdist's.",
)
@click.option(
    "--profile",
    metavar="DIR",
    help="Shards: short trainings here, on one process and on two, measure what else is a "
    "default: how fast a device computes, and what it does at the same time.",
)
@click.option(
    "--find-batch",
    is_flag=True,
    help="Try the largest batch of what is recommended, on the devices here: each try is a short "
    "training in processes that may die.",
)
@click.option(
    "--check",
    "is_checked",
    is_flag=True,
    help="Run a step of each row that one process here can run, and show its bytes beside those "
    "that were told. Of cpu:N alone.",
)
@click.option(
    "--usd-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    help="Price of a host, such as a spot price.  [default: on demand, as `tfdist aws cost`]",
)
@click.option("--region", default="us-east-1", help="Of AWS: whose electricity it is.")
@plot_option("Draw memory and scaling.")
@click.option(
    "--jobs",
    type=click.Path(path_type=Path),
    help="Instead of a model: YAML of several trainings and of hosts; shows which run where.",
)
def command(
    model: str | None,
    devices: str | None,
    global_batch_size: int,
    device_file: Path | None,
    profile: str | None,
    find_batch: bool,
    is_checked: bool,
    usd_per_hour: float | None,
    region: str,
    plot: Path | None,
    jobs: Path | None,
) -> int:
    """Shows what a step needs on each strategy, how long it takes, and which one to take.

    Nothing is trained. The step of each strategy is traced, and its bytes and operations counted;
    the time is computed from what the device file says of devices and links, unless --profile
    measures it. Each kind of number is told with where it comes from.
    """
    if jobs is not None:
        _refuse_beside_jobs()
        _show_jobs(jobs, device_file)
        return 0
    if model is None or devices is None:
        raise OptionError(
            "a plan must have --model and --devices, or --jobs",
            received="neither" if model is devices else "one of the two",
            mend="Write for example --model model.py:model_fn --devices h100:8",
        )
    from tfdist.cli import plan_charts

    cluster = DeviceTable.load(device_file).cluster(devices)
    if is_checked:
        refuse_other_devices(cluster.device.name)
    costs = costs_of(cluster, usd_per_hour, region)
    doing = "finding what a step of each strategy needs"
    with stdout().status(doing) as status:
        traced = []

        def take(number: int, event: dict[str, Any]) -> None:
            if event["event"] in ("needs", "refused", "died"):
                traced.append(number)
                status.update(f"{doing}: {len(traced)} steps traced")
                voice.progress("tracing", len(traced), None, "steps")
            if event["event"] == "tried":
                stdout().print(f"tried   {event['text']}")
            voice.take(number, event)

        made = plan(
            model,
            devices,
            global_batch_size=global_batch_size,
            device_file=device_file,
            profile=profile,
            find_batch=find_batch,
            on_event=take,
        )
        checks = []
        if is_checked:
            status.update("running a step of each row that one process can run")
            checks = check_plan(model, made, voice.take)
    told = made.to_json()
    for point in told["scaling"]:
        point |= costs.of_rows(point["hosts"], point["grown_rows_per_s"])
    if is_checked:
        told["checks"] = [vars(check) for check in checks]
    voice.result(plan=told)
    _print(made, costs)
    if is_checked:
        _print_checks(checks)
    if plot is not None:
        plan_charts.draw(made, plot)
        stdout().print(f"chart   {plot}")
    return int(any(check.measured is None for check in checks))


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
        hours = hosts * 1e6 / rows_per_s / 3600
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


def _refuse_beside_jobs() -> None:
    named = [spelt(each.name) for each in others_than(("jobs", "device_file"))]
    if named:
        raise OptionError(
            "--jobs must be given without what is of one model, for its file says what each takes",
            received=" and ".join(sorted(named)),
            mend="Leave that out, or --jobs",
        )


def _show_jobs(path: Path, device_file: Path | None) -> None:
    """Prints where each job of a file runs, and what to do when one ends."""
    jobs, pool = read_jobs(path, DeviceTable.load(device_file))
    placed = place(jobs, pool)
    endings = [when_ended(name, placed, jobs, pool) for name in placed.slots]
    voice.result(
        jobs={
            name: {"hosts": placed.hosts_of(name), "shares_with": placed.shared_with(name)}
            for name in placed.slots
        },
        waiting=list(placed.waiting),
        endings=[{"job": e.job, "starts": e.starts, "moves": e.moves} for e in endings],
    )
    titles = ("job", "devices", "runs on", "shares devices with", "when it ends")
    table = table_of(None, titles, ())
    for job in jobs:
        table.add_row(job.name, str(job.devices), *_cells(job.name, placed, endings))
    console = stdout()
    console.print(table)
    console.print(
        "a device is shared where both fit in its memory, and are busy together for at most all of "
        "the time; memory and busy: as the file says, busy 1 where it does not"
    )


def _cells(name: str, placed: Placement, endings: list[Ending]) -> tuple[str, str, str]:
    if name in placed.waiting:
        return "waits: no room", "", ""
    (ending,) = (each for each in endings if each.job == name)
    after = [f"{other} starts on {_listed(hosts)}" for other, hosts in ending.starts.items()]
    after += [f"move {other} to {_listed(hosts)}" for other, hosts in ending.moves.items()]
    return _listed(placed.hosts_of(name)), ", ".join(placed.shared_with(name)), "; ".join(after)


def _listed(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{host}: {count}" for host, count in hosts.items())


def _print(made: Plan, costs: Costs) -> None:
    console = stdout()
    console.print(_rows_table(made))
    console.print(f"take    {made.advice.reason}")
    if made.found_batch is not None:
        console.print(f"tried   {made.found_batch:,} rows a step fit, the most that was tried")
    if made.not_found is not None:
        console.print(f"tried   nothing found: {made.not_found}")
    for row in made.rows:
        if row.refusal is not None:
            console.print(f"refused {row.name}: {row.refusal}")
    if made.scaling is not None:
        console.print(_scaling_table(made, costs))
        last = made.scaling.last_that_pays
        few, gain = f"up to {last:,} devices: another gives", "less than half of the first"
        few = "a second device gives" if last == 1 else few
        console.print(f"pays    with the same rows a step {few} {gain}")
    sources = (*made.sources, *costs.sources)
    for name, line in zip(("from", *[""] * len(sources)), sources, strict=False):
        console.print(f"{name:8}{line}")


def _rows_table(made: Plan) -> Table:
    title = f"{made.cluster.describe()}, {made.global_batch_size:,} rows a step"
    numbers = ("memory", "fits", "largest batch", "sent a step", "sending", "a step", "speed-up")
    table = table_of(title, ("strategy", "options"), numbers)
    for row in made.rows:
        if row.refusal is not None:
            continue
        table.add_row(
            row.candidate.strategy,
            row.candidate.describe(),
            size(row.peak),
            "yes" if row.fits else "no",
            _largest(row, made.global_batch_size),
            size(row.sent.size) if row.sent.size else "",
            seconds(row.sent.seconds) if row.sent.seconds else "",
            seconds(row.step_s) if row.step_s else "",
            f"{row.speed_up:.2f}" if row.speed_up else "",
            style="bold" if row is made.advice.row else None,
        )
    return table


def _print_checks(checks: list[Check]) -> None:
    title = "told and measured, on the device that holds most"
    table = table_of(title, ("strategy",), ("told", "measured", "told / measured"))
    for check in checks:
        if check.measured is not None:
            of_it = f"{check.told / check.measured:.3f}"
            table.add_row(check.name, size(check.told), size(check.measured), of_it)
    stdout().print(table)
    for check in checks:
        if check.measured is None:
            stdout().print(f"failed  {check.name}: {check.why}")


def _largest(row: Row, batch: int) -> str:
    """Bytes of some steps do not grow with the batch, as far as two batches tell."""
    if row.largest_batch is None or (row.fits and row.largest_batch < batch):
        return f"≥ {batch:,}"
    return f"{row.largest_batch:,}" if row.largest_batch < 1e6 else "> a million"


def _scaling_table(made: Plan, costs: Costs) -> Table:
    one = made.global_batch_size
    fits = "" if made.rows[0].fits else f"; {one:,} rows do NOT FIT on one, as the replicas are"
    title = f"replicas of one device: the same {one:,} rows a step, or {one:,} on each device"
    titles = ("devices", "hosts", "same: a step", "speed-up", "efficiency", "each: rows/s")
    titles += ("efficiency", "USD/10⁶ rows", "kg CO2e/10⁶ rows")
    table = table_of(title + fits, (), titles)
    for point in made.scaling.points if made.scaling else ():
        price = costs.of_rows(point.hosts, point.grown_rows_per_s)
        usd, kilograms = price["usd_per_million_rows"], price["kg_co2_per_million_rows"]
        table.add_row(
            f"{point.devices:,}",
            f"{point.hosts:,}",
            "" if point.step_s is None else seconds(point.step_s),
            "" if point.speed_up is None else f"{point.speed_up:.2f}",
            "" if point.efficiency is None else f"{point.efficiency:.0%}",
            _rate(point.grown_rows_per_s),
            f"{point.grown_efficiency:.0%}",
            "" if usd is None else f"{usd:.3g}",
            "" if kilograms is None else f"{kilograms:.3g}",
        )
    return table


def size(count: float) -> str:
    """Returns bytes as people read them."""
    return _in_units(count, {"GB": 1e9, "MB": 1e6, "kB": 1e3})


def seconds(time: float) -> str:
    return _in_units(time, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def _in_units(value: float, units: dict[str, float]) -> str:
    unit = next((name for name, least in units.items() if value >= least), list(units)[-1])
    return f"{_rate(value / units[unit])} {unit}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
