"""tfdist shard: from raw data to TFRecord shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.cli import voice
from tfdist.cli.console import megabytes, progress_bar, stdout
from tfdist.cli.option_table import names_option
from tfdist.errors import OptionError
from tfdist.records.buckets.urls import url_of
from tfdist.records.parts import Part
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfdist.records.format.columns import Columns
    from tfdist.records.format.manifest import Manifest

_INPUTS_SHOWN = 20

_EPILOG = """\b
Examples:
  tfdist shard digits data/digits
  tfdist shard photos data/photos --num-shards 8 --stratify     (photos/CLASS/IMAGE)
  tfdist shard photos data/photos --resize 224x224 --crop
  tfdist shard photos data/photos --labels labels.csv --resize 224x224 --skip-bad
  tfdist shard coco data/coco --resize 512x512                  (coco/annotations/instances_*.json)
  tfdist shard photos data/photos --resize 224x224 --resume     (goes on where a run was ended)
  tfdist shard photos data/photos --part 2/8 --resume           (of an array job; then merge)
  tfdist shard iris.csv data/iris --label species --split train=4,validation=1,test=1
  tfdist shard visits.csv data/visits --label sick,days --drop name
  tfdist shard reviews.jsonl data/reviews --label stars --text title
  tfdist shard sales.csv.gz data/sales --label sold --missing mask --ignore note,by
  tfdist shard arrays.npz data/arrays --compression gzip --workers 2
  tfdist shard digits fed --clients 30 --partition dirichlet:0.3
  tfdist shard visits.csv fed --label sick --partition by:hospital
"""


@click.command("shard", epilog=_EPILOG)
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--num-shards",
    type=int,
    help="Shards of each split.  [default: of about 150 MB each, at least 4]",
)
@click.option(
    "--split",
    metavar="NAME=SHARE,...",
    help="The splits and their shares.  [default: those of the source, else train=5,validation=1]",
)
@click.option("--stratify", is_flag=True, help="Give every split the proportions of the classes.")
@click.option("--seed", type=int, default=0, help="Seed of the shuffle.")
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip"]),
    default="none",
    help="Compression of the shards.",
)
@names_option("--label", text="The label, or several: columns of a table, arrays of a .npz.")
@names_option(
    "--inputs",
    text="The inputs; what is neither label nor input is dropped.  [default: all but the label]",
)
@names_option("--drop", "--ignore", text="Columns or arrays to leave out.")
@click.option("--weight", metavar="NAME", help="The sample weight.  [default: sample_weight]")
@names_option("--text", text="Columns of a table that are text, whatever they look like.")
@names_option(
    "--categories",
    text="Columns of a table that become numbers of their sorted values.  "
    "[default: text of at most 1000 values, in fewer than half of the rows]",
)
@click.option(
    "--missing",
    metavar="HOW",
    help="What becomes of missing values of a table: drop (the row), mean, median, a number, or "
    "mask (0, and a second input that tells).  [default: they are refused]",
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
    help="Decode each image before anything is written, to see that it can be.",
)
@click.option(
    "--resize",
    metavar="HxW",
    help="The size that images are read in, such as 224x224; their files are kept as they are.",
)
@click.option("--crop", is_flag=True, help="With --resize: cut off what is too much.")
@click.option("--pad", is_flag=True, help="With --resize: fill what is missing with zeros.")
@click.option("--color", type=click.Choice(["rgb", "gray"]), help="What images are read as.")
@click.option("--write-resized", is_flag=True, help="Write images anew in the size of --resize.")
@click.option(
    "--labels",
    metavar="FILE",
    help="A table with a row for each image of the folder SOURCE, or COCO's "
    "instances_*.json, or the folder with these.  [default: SOURCE/annotations, where they are]",
)
@click.option(
    "--masks", metavar="FOLDER", help="Masks of the images in SOURCE, which are called alike."
)
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave out rows, texts and images that cannot be read, or images that lack their row or "
    "mask, and tell how many they are.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with what a run that was ended has kept in OUT.unfinished: the shards that are "
    "missing are written.  Of streams nothing is kept: they begin anew.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Remove that instead, and begin anew; shards in OUT are never touched.",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Write part I of N of the shards alone, beside OUT: OUT.part-2-of-8; `tfdist merge OUT` "
    "joins all parts. A part that is there whole is left as it is with --resume, and written again "
    "with --overwrite.",
)
@click.option(
    "--workers",
    type=int,
    help="Threads for images, processes for tables, texts and arrays; the shards are the same "
    "whatever their number.  [default: one for each core for a folder of images, else 1]",
)
def command(source: str, out: Path, crop: bool, pad: bool, part: str | None, **given: Any) -> None:
    """Writes SOURCE as TFRecord shards, with a manifest.json, into the new folder OUT.

    SOURCE is a folder of images of any size, in class folders (which may lie in train/, val/ and
    test/), with COCO's annotations/, or with --labels or --masks; a folder of .txt files in class
    folders; a table (.csv, .tsv or .jsonl, also with .gz, .parquet, .arrow, .feather); a .npz or
    .npy file, or a folder of .npy files; a .tar file, as webdataset writes it; another folder of
    shards, DIR or DIR/SPLIT; or the name "digits": 1,797 images of handwritten digits, which come
    with tfdist.

    Every record is an ordinary tf.train.Example.
    """
    from tfdist.records.writing.writer import write

    if crop and pad:
        raise OptionError("--crop and --pad must not go together", mend="Leave one out")
    sources: list[Columns] = []
    with progress_bar("records") as bar:
        task = bar.add_task("Writing", total=None)
        manifest = write(
            source,
            out,
            fit="crop" if crop else "pad" if pad else None,
            **given,
            part=part,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            opened=sources.append,
        )
    for note in sources[0].notes:
        print(f"tfdist: {note}")
    _print_roles(source, sources[0].roles)
    if part is None:
        tell_shards(out, manifest)
    else:
        tell_shards(
            Part.of(part).path_of(out), manifest, f"tfdist merge {out}, when all parts are there"
        )


def _print_roles(source: str, roles: Sequence[tuple[str, str]]) -> None:
    """Shows what each column has become; of many inputs only the first."""
    if not roles:
        return
    table = table_of(source, ("column", "becomes"), ())
    inputs = 0
    for name, role in roles:
        inputs += role == "input"
        if role != "input" or inputs <= _INPUTS_SHOWN:
            table.add_row(name, role)
    if inputs > _INPUTS_SHOWN:
        table.add_row(f"and {inputs - _INPUTS_SHOWN} more", "input")
    stdout().print(table)


def tell_shards(out: Path, manifest: Manifest, then: str | None = None, **told: int) -> None:
    """Tells of shards that were written, and what is next."""
    name = url_of(out) or str(out)
    voice.result(folder=name, splits=voice.splits(manifest), **told)
    table = table_of(name, ("split",), ("records", "shards", "size"))
    for split_name, split in manifest.splits.items():
        size = megabytes(split.bytes)
        table.add_row(split_name, f"{split.records:,}", str(len(split.shards)), size)
    console = stdout()
    console.print(table)
    console.print(f"next: {then or f'tfdist inspect {name} --check'}")
