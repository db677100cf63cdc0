"""``tfdist merge``: what the jobs of an array have made apart, as one."""

from __future__ import annotations

from pathlib import Path

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout

_EPILOG = """\b
Examples:
  tfdist predict ... --output predictions.csv --part 1/2
  tfdist predict ... --output predictions.csv --part 2/2
  tfdist merge predictions.csv
"""


@click.command("merge", epilog=_EPILOG, short_help="Join parts to one.")
@click.argument("output", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace FILE when all parts are joined.")
def command(output: Path, *, overwrite: bool) -> None:
    """Joins the parts of FILE, which `tfdist predict --output FILE --part I/N` has written.

    It becomes what one run would have written, to the last byte of a table that is text. Each
    record is in it once, or nothing is written: parts that are missing, or are of other weights or
    records, are named with the command that makes them. The parts are removed when FILE is whole.
    """
    from tfdist.runs.prediction_parts import merge

    found = merge(output, overwrite=overwrite)
    voice.result(output=str(found.output), parts=found.parts, records=found.records)
    stdout().print(
        f"{found.records:,} records of {found.parts:,} parts  {found.output}", soft_wrap=True
    )
