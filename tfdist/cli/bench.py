"""``tfdist bench``: speed-up, throughput and scalability of strategies on this machine."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tfdist.benching import chart, fits, planned, sums, workloads
from tfdist.cli import completion, voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import options_of, plot_option
from tfdist.compat import follow_program
from tfdist.errors import OptionError
from tfdist.records.report_text import table_of
from tfdist.runs.needs import find_needs
from tfdist.runs.settings import OfLearning, Settings
from tfdist.runs.training import find_splits
from tfdist.training.engine import model_path

_EPILOG = """\b
Examples:
  tfdist bench --strategies single,mirrored,horovod --workers 1,2 --plot scaling.png
  tfdist bench --model resnet50v2 --data cifar10-like --image-size 128
      --strategies single,horovod,multi_worker --workers 1,2 --limit-steps 5
  tfdist bench --model model.py:model_fn --data data/digits --strategies single,horovod
  tfdist bench allreduce --sizes 1KiB:64MiB --plot sums.png
"""
_SUMS_EPILOG = """\b
Examples:
  tfdist bench allreduce
  tfdist bench allreduce --ways mpi,gloo --workers 2 --sizes 1KiB:64MiB --plot sums.png
"""


@click.group("bench", epilog=_EPILOG, invoke_without_command=True)
@click.option(
    "--model",
    default="mlp",
    metavar="NAME|FILE.py:NAME",
    help=f"A built-in model: {', '.join(workloads.MODELS)}; or a function that returns a compiled "
    "Keras model.",
)
@click.option(
    "--data",
    metavar="NAME|DIR",
    shell_complete=completion.data,
    help="cifar10-like or tokens-like, which are generated; a folder cifar-10-batches-py; or "
    "shards written by tfdist shard.  [default: what goes with the built-in model]",
)
@click.option(
    "--records",
    type=click.IntRange(min=12),
    default=6_000,
    help="Of built-in data, five of six to train on; CIFAR-10 has 60,000.",
)
@click.option(
    "--image-size",
    type=click.IntRange(min=32),
    default=32,
    help="Height and width that a built-in model of images resizes them to.",
)
@click.option(
    "--strategies",
    default="single,mirrored,horovod,multi_worker",
    metavar="A,B",
    help="What to train on.",
)
@click.option(
    "--workers",
    default="1,2",
    metavar="N,M",
    help="Numbers of devices: of workers, or of the devices of one process.",
)
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    help="Cores of a device.  [default: this machine's, divided by the most devices]",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, help="How often each is trained, in turn."
)
@options_of(OfLearning, "epochs", "global_batch_size", "seed", "limit_steps", epochs={"default": 2})
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Keep model, data and trainings in this new folder.  [default: nothing is kept]",
)
@plot_option("Draw throughput and efficiency, and what is planned to 64 devices.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    data: str | None,
    records: int,
    image_size: int,
    strategies: str,
    workers: str,
    cores: int | None,
    rounds: int,
    output: Path | None,
    plot: Path | None,
    **learning: Any,
) -> int:
    """Trains the same model on several strategies in turn, and shows what each takes.

    The first epoch of each training does not count, for it traces the step. Samples a second are
    the median of the other epochs, of all rounds; +- is half of how far they lie apart. Every
    device has as many cores as any other, so that efficiency, speed-up over devices, tells what
    the strategy costs and not what the machine lacks.

    Planned are the samples a second that `tfdist plan` predicts, fitted to the row on one device
    and to one of each strategy on several; --plot draws them to 64 devices.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    entries = fits.entries(strategies.split(","), _numbers("workers", workers))
    settings = Settings(stop_on_nan=False, **learning)
    batch = settings.global_batch_size
    fits.check(settings)
    data = _data_for(model, data)
    load = os.getloadavg()[0]
    with _folder(output) as folder:
        if workloads.is_built_in(data):
            data = workloads.write_data(data, records, folder, learning["seed"])
        path = model if ":" in model else workloads.write_model(model, image_size, folder)
        with stdout().status("measuring") as status:

            def take(row: str, event: dict[str, Any]) -> None:
                status.update(f"measuring {row}: {event['event']} {event.get('epoch', '')}")
                voice.tell("measuring", row=row, of=event)

            rows = fits.run(
                entries,
                model=path,
                data=data,
                settings=settings,
                rounds=rounds,
                folder=folder / "runs",
                cores=cores,
                on_event=take,
            )
            status.update("planning: tracing a step")
            broken_off = None
            try:
                plan = planned.predict(
                    rows,
                    lambda asked: find_needs(path, [each.traced for each in asked], rows=batch),
                    batch,
                )
            except (KeyboardInterrupt, SystemExit) as error:  # The rows took long, and stay.
                plan, broken_off = planned.Planned(batch, (), "nothing: broken off"), error
    base, gains = fits.speed_up(rows)
    voice.result(
        compared_with=fits.called(base.entry),
        rows=[_row_for_programs(row, gains.get(at), base, plan) for at, row in enumerate(rows)],
        planned=plan.to_json(),
    )
    _print(rows, base, gains, plan)
    for note in fits.notes(rows, load):
        stdout().print(note)
    if plot is not None:
        chart.draw(rows, plan, plot, f"{model}, {batch} rows a step")
        stdout().print(f"plot  {plot}")
    if broken_off is not None:
        raise broken_off
    return int(any(row.has_failed for row in rows))


def _data_for(model: str, data: str | None) -> str:
    """Returns what a model is trained on; both are checked, before anything is written for them.

    Raises:
        TfdistError: there is no such model, or no such data.
    """
    if ":" not in model:
        workloads.check_model(model)
        data = data or workloads.MODELS[model]
    else:
        follow_program(os.environ, model_path.parts(model)[0])
        model_path.check(model)
    if data is None:
        raise OptionError(
            "a model of your own must be given its data",
            received="no --data",
            mend="Name shards, or one of cifar10-like and tokens-like",
        )
    if not workloads.is_built_in(data):
        find_splits(data)
    return data


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Gives the folder for what is written: a new one, or one that goes at the end."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
            yield Path(folder)
        return
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise OptionError(
            "--output must be a new folder",
            received=f"{output}: {error.strerror}",
            mend="Name one that is not there",
        ) from None
    try:
        yield output
    finally:
        with contextlib.suppress(OSError):
            output.rmdir()  # When nothing was left in it.


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(
            f"--{option} must be whole numbers above 0 with commas between",
            received=repr(text),
            mend=f"Write --{option} 1,2",
        )
    return sorted({int(part) for part in parts})


def _row_for_programs(
    row: fits.Measured, gain: float | None, base: fits.Measured, plan: planned.Planned
) -> dict[str, Any]:
    told = {"strategy": row.entry.strategy, "devices": row.entry.devices}
    if gain is None:
        return told | {"failed" if row.has_failed else "refused": str(row.refused)}
    return told | {
        "replicas": row.replicas,
        "epoch_seconds": row.epoch_seconds,
        "samples_per_s": row.speed,
        "spread": row.spread,
        "planned_samples_per_s": plan.line(row.entry.strategy).get(row.entry.devices),
        "speed_up": gain,
        "efficiency": gain * base.entry.devices / row.entry.devices,
        "metrics": row.metrics,
    }


def _print(
    rows: list[fits.Measured],
    base: fits.Measured,
    gains: dict[int, float],
    plan: planned.Planned,
) -> None:
    name = next((name for name in base.metrics if name != "loss"), "loss")
    numbers = ("s/epoch", "samples/s", "+-", "planned", "speed-up", "efficiency", name)
    table = table_of(None, ("strategy",), ("devices", *numbers))
    for at, row in enumerate(rows):
        entry = row.entry
        if at not in gains:
            why = "failed" if row.has_failed else "refused"
            table.add_row(entry.strategy, str(entry.devices), why)
            continue
        table.add_row(
            entry.strategy,
            str(entry.devices),
            f"{statistics.median(row.epoch_seconds):.2f}",
            f"{row.speed:,.1f}",
            f"{row.spread / 2:.0%}",
            _planned(entry, plan),
            f"{gains[at]:.2f}",
            f"{gains[at] * base.entry.devices / entry.devices:.0%}",
            f"{row.metrics.get(name, float('nan')):.4f}",
        )
    console = stdout()
    console.print(table)
    console.print(f"speed-up over {fits.called(base.entry)}")
    console.print(f"planned  {plan.source}")
    for row in rows:
        if row.refused is not None:
            console.print(f"{fits.called(row.entry)}: {row.refused}")


def _planned(entry: fits.Entry, plan: planned.Planned) -> str:
    if (entry.strategy, entry.devices) in plan.fitted:
        return "fitted"
    speed = plan.line(entry.strategy).get(entry.devices)
    return "" if speed is None else f"{speed:,.1f}"


# Sums alone -------------------------------------------------------------------------------------


@command.command("allreduce", epilog=_SUMS_EPILOG)
@click.option("--sizes", default="1KiB:16MiB", metavar="FROM:TO")
@click.option(
    "--ways",
    metavar="A,B",
    help=f"What adds up: {', '.join(sums.WAYS)}.  [default: those that are installed]",
)
@click.option("--workers", type=click.IntRange(min=2), default=2)
@plot_option("Draw the seconds over the bytes.")
def sums_alone(sizes: str, ways: str | None, workers: int, plot: Path | None) -> None:
    """Measures how long processes of this machine take to add tensors up.

    Each number is the median of 5 to 200 sums of float32. Bus bandwidth is what each link of a ring
    carries, 2 (p - 1) / p of the bytes over the seconds, which tells the same for any number of
    ranks p.
    """
    chosen = sums.available() if ways is None else list(dict.fromkeys(ways.split(",")))
    asked = sums.sizes_of(sizes)
    with stdout().status("adding up") as status:

        def take(way: str, event: dict[str, Any]) -> None:
            status.update(f"adding up by {way}: {event.get('bytes', 'starting')}")

        rows = sums.run(chosen, asked, workers, take)
    titles = [f"{way}{unit}" for way in chosen for unit in (" ms", " MB/s")]
    table = table_of(None, (), ("bytes", *titles))
    took = {(way, size): seconds for way, size, seconds in rows}
    for size in asked:
        cells = []
        for way in chosen:
            seconds = took[way, size]
            bandwidth = sums.bus_bandwidth(size, seconds, workers)
            cells += [f"{seconds * 1e3:,.3f}", f"{bandwidth / 1e6:,.1f}"]
        table.add_row(f"{size:,}", *cells)
    voice.result(
        workers=workers,
        sums=[
            {
                "way": way,
                "bytes": size,
                "seconds": seconds,
                "bus_bytes_per_s": sums.bus_bandwidth(size, seconds, workers),
            }
            for way, size, seconds in rows
        ],
    )
    stdout().print(table)
    if plot is not None:
        chart.draw_sums(rows, plot, f"sums over {workers} processes")
        stdout().print(f"plot  {plot}")
