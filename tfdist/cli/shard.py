"""tfdist shard: from raw data to TFRecord shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfdist.records.format.columns import Columns
    from tfdist.records.format.manifest import Manifest

_INPUTS_SHOWN = 20

_EPILOG = """\b
Examples:
  tfdist shard digits data/digits
  tfdist shard photos data/photos --num-shards 8 --stratify     (photos/CLASS/IMAGE)
  tfdist shard iris.csv data/iris --label species --split train=4,validation=1,test=1
  tfdist shard visits.csv data/visits --label sick,days --drop name
  tfdist shard arrays.npz data/arrays --compression gzip --workers 2
  tfdist shard digits fed --clients 30 --partition dirichlet:0.3
  tfdist shard visits.csv fed --label sick --partition by:hospital
"""


def _joined(_ctx: object, _option: object, given: tuple[str, ...]) -> str | None:
    """Takes an option that is given several times as one list of names."""
    return ",".join(given) or None


@click.command("shard", epilog=_EPILOG, short_help="Write data as TFRecord shards.")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--num-shards", type=int, help="Shards of each split.  [default: 4]")
@click.option(
    "--split",
    default="train=5,validation=1",
    show_default=True,
    metavar="NAME=SHARE,...",
    help="The splits and their shares.",
)
@click.option("--stratify", is_flag=True, help="Give every split the proportions of the classes.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the shuffle.")
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip"]),
    default="none",
    show_default=True,
    help="Compression of the shards.",
)
@click.option(
    "--label",
    metavar="NAME,...",
    multiple=True,
    callback=_joined,
    help="The label, or several: columns of a .csv, arrays of a .npz.",
)
@click.option(
    "--inputs",
    metavar="NAME,...",
    multiple=True,
    callback=_joined,
    help="The inputs; what is neither label nor input is dropped.  [default: all but the label]",
)
@click.option(
    "--drop",
    metavar="NAME,...",
    multiple=True,
    callback=_joined,
    help="Columns or arrays to leave out.",
)
@click.option(
    "--clients",
    type=int,
    metavar="N",
    help="Deal the first split to N clients of federated learning, a shard for each.",
)
@click.option(
    "--partition",
    metavar="HOW",
    help="How: iid (the default), dirichlet:ALPHA (few classes a client when ALPHA is small), "
    "shards:K (sorted by class, K pieces a client), or by:COLUMN, without --clients: a client for "
    "each value of a column, which is then no input.",
)
@click.option(
    "--decode/--no-decode",
    default=True,
    show_default=True,
    help="Decode each image that is kept as it is, to see that it can be.",
)
@click.option("--workers", type=int, default=1, show_default=True, help="Threads that write.")
def command(
    source: str,
    out: Path,
    num_shards: int | None,
    split: str,
    stratify: bool,
    seed: int,
    compression: str,
    label: str | None,
    inputs: str | None,
    drop: str | None,
    clients: int | None,
    partition: str | None,
    decode: bool,
    workers: int,
) -> None:
    """Writes SOURCE as TFRecord shards, with a manifest.json, into the new folder OUT.

    SOURCE is a folder of class folders with images, a .csv file with a header, a .npz file, or the
    name "digits": 1,797 images of handwritten digits, which come with tfdist.

    Every record is an ordinary tf.train.Example.
    """
    from tfdist.cli.console import progress_bar
    from tfdist.records.writing.writer import write

    sources: list[Columns] = []
    with progress_bar("records") as bar:
        task = bar.add_task("Writing", total=None)
        manifest = write(
            source,
            out,
            num_shards=num_shards,
            split=split,
            stratify=stratify,
            seed=seed,
            compression=compression,
            workers=workers,
            label=label,
            inputs=inputs,
            drop=drop,
            clients=clients,
            partition=partition,
            decode=decode,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            opened=sources.append,
        )
    _print_roles(source, sources[0].roles)
    _print_summary(out, manifest)


def _print_roles(source: str, roles: Sequence[tuple[str, str]]) -> None:
    """Shows what each column has become; of many inputs only the first."""
    from rich.table import Table

    from tfdist.cli.console import stdout

    if not roles:
        return
    table = Table("column", "becomes", title=source, title_justify="left")
    table.columns[0].overflow = "fold"
    inputs = 0
    for name, role in roles:
        inputs += role == "input"
        if role != "input" or inputs <= _INPUTS_SHOWN:
            table.add_row(name, role)
    if inputs > _INPUTS_SHOWN:
        table.add_row(f"and {inputs - _INPUTS_SHOWN} more", "input")
    stdout().print(table)


def _print_summary(out: Path, manifest: Manifest) -> None:
    from rich.table import Table

    from tfdist.cli.console import megabytes, stdout

    table = Table(title=str(out), title_justify="left")
    table.add_column("split")
    for name in ("records", "shards", "size"):
        table.add_column(name, justify="right")
    for name, split in manifest.splits.items():
        size = megabytes(split.bytes)
        table.add_row(name, f"{split.records:,}", str(len(split.shards)), size)
    console = stdout()
    console.print(table)
    console.print(f"next: tfdist inspect {out} --check", soft_wrap=True)
