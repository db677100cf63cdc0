"""``tfdist bench allreduce``: how long processes of this machine take to add tensors up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfdist.benching import chart, sums
from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.option_table import plot_option
from tfdist.records.report_text import table_of

_EPILOG = """\b
Examples:
  tfdist bench allreduce
  tfdist bench allreduce --ways mpi,gloo --workers 2 --sizes 1KiB:64MiB --plot sums.png
"""


@click.command("allreduce", epilog=_EPILOG)
@click.option("--sizes", default="1KiB:16MiB", metavar="FROM:TO")
@click.option(
    "--ways",
    metavar="A,B",
    help=f"What adds up: {', '.join(sums.WAYS)}.  [default: those that are installed]",
)
@click.option("--workers", type=click.IntRange(min=2), default=2)
@plot_option("Draw the seconds over the bytes.")
def command(sizes: str, ways: str | None, workers: int, plot: Path | None) -> None:
    """Measures how long processes of this machine take to add tensors up.

    Each number is the median of 5 to 200 sums of float32. Bus bandwidth is what each link of a ring
    carries, 2 (p - 1) / p of the bytes over the seconds, which tells the same for any number of
    ranks p.
    """
    chosen = sums.available() if ways is None else ways.split(",")
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
