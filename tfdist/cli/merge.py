"""``tfdist merge``: what the jobs of an array have made apart, as one."""

from __future__ import annotations

from pathlib import Path

import click

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.cli.shard import tell_shards
from tfdist.errors import OptionError

_EPILOG = """\b
Examples:
  tfdist predict ... --output predictions.csv --part 1/2
  tfdist predict ... --output predictions.csv --part 2/2
  tfdist merge predictions.csv
  tfdist shard photos data/photos --part 1/2
  tfdist shard photos data/photos --part 2/2
  tfdist merge data/photos
"""


@click.command("merge", epilog=_EPILOG)
@click.argument("output", metavar="FILE|DIR", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace FILE when all parts are joined.")
def command(output: Path, *, overwrite: bool) -> None:
    """Joins parts that `tfdist predict --output FILE --part I/N`, or `tfdist shard`, has written.

    FILE becomes what one run would have written, to the last byte of a table that is text; DIR
    becomes the shards of one run, byte for byte. Each record is in it once, or nothing is written:
    parts that are missing, or are of other weights, records or options, are named. The parts are
    removed when FILE or DIR is whole.
    """
    from tfdist.records.writing import shard_parts
    from tfdist.runs import prediction_parts

    has_parts = bool(shard_parts.folders_of(output.resolve()))
    # A file of predictions has a suffix, by which its kind is chosen.
    if has_parts or not output.suffix:
        if overwrite:
            raise OptionError(
                "--overwrite must go with a file of predictions",
                received=f"{output}, of shards, which are never replaced",
                mend="Leave it out",
            )
        manifest, parts = shard_parts.merge(output)
        tell_shards(output, manifest, parts=parts)
        return
    parts, records = prediction_parts.merge(output, overwrite=overwrite)
    voice.result(output=str(output), parts=parts, records=records)
    stdout().print(f"{records:,} records of {parts:,} parts  {output}")
