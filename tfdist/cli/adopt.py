"""tfdist adopt: TFRecord files that others wrote become shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.cli import voice
from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.option_table import names_option
from tfdist.records.buckets.urls import url_of
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from tfdist.records.adopting.describe import Described

_EPILOG = """\b
Examples:
  tfdist adopt imagenet --input image/encoded --label image/class/label --first-class 1
      --resize 224x224 --crop
  tfdist adopt ~/tensorflow_datasets/mnist/3.0.1 --out data/mnist
  tfdist adopt 'logs/part-*' --split train='part-0*' --split validation='part-1*'
  tfdist adopt data/photos --resize 160x160     (changes how shards are read, and writes none)
  tfdist adopt data/photos --resize none
  tfdist adopt s3://bucket/imagenet --resize 224x224
"""


def _splits(
    _ctx: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str] | None:
    splits: dict[str, str] = {}
    for text in given:
        name, equals, pattern = text.partition("=")
        if not equals or not pattern or name in splits:
            raise click.BadParameter(
                f"must be NAME=PATTERN, each name once, but found '{text}'", param=option
            )
        splits[name] = pattern
    return splits or None


def _length(_ctx: object, option: click.Parameter, given: str | None) -> int | str | None:
    if given is None or given == "none":
        return given
    if not given.isdecimal():
        raise click.BadParameter(f"must be a number or none, but found '{given}'", param=option)
    return int(given)


@click.command("adopt", epilog=_EPILOG)
@click.argument("source", nargs=-1, required=True, metavar="FOLDER_OR_FILES...")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new folder for the manifest.  [default: the folder of the files]",
)
@names_option(
    "--input",
    "inputs",
    text="The features that are inputs.  [default: the only image, or the only feature]",
)
@names_option(
    "--label",
    "labels",
    text="The features that are labels.  [default: the whole number that is called a label]",
)
@click.option("--weight", metavar="NAME", help="The feature that is the sample weight.")
@click.option(
    "--split",
    metavar="NAME=PATTERN",
    multiple=True,
    callback=_splits,
    help="The files of a split; can be repeated.  [default: by their names]",
)
@click.option("--first-class", type=int, metavar="N", help="The smallest class id, if it is not 0.")
@click.option(
    "--classes",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The names of the classes, a line for each.",
)
@click.option("--resize", metavar="HxW|none", help="Read images in this size.")
@click.option("--crop", "fit", flag_value="crop", help="Resize so that nothing is left empty.")
@click.option("--pad", "fit", flag_value="pad", help="Resize so that nothing is cut off.")
@click.option("--stretch", "fit", flag_value="stretch", help="Resize each side by itself.")
@click.option(
    "--color", type=click.Choice(["rgb", "gray", "none"]), help="Read images in these colors."
)
@click.option(
    "--max-length",
    metavar="N|none",
    callback=_length,
    help="Read lists of variable length with N entries.",
)
def command(source: tuple[str, ...], out: Path | None, **given: Any) -> None:
    """Makes shards of TFRecord files that others wrote: a folder, or files and patterns of them.

    The files are read once, and stay as they are: a manifest.json is written beside them, or into
    OUT. A folder in a bucket may be named by its URL, and gets the manifest. Records are
    tf.train.Examples or SequenceExamples, also compressed with gzip.

    On a folder that has a manifest, --resize, --color and --max-length change how its records are
    read, and nothing else.
    """
    from tfdist.cli.inspect import schema_table, splits_table
    from tfdist.records.adopting.adopt import FAULTS_SHOWN, DamagedFilesError, adopt
    from tfdist.records.adopting.choose import UnclearError

    notes: list[str] = []
    try:
        with progress_bar("bytes") as bar:
            task = bar.add_task("Reading", total=None)
            manifest = adopt(
                list(source),
                out,
                **given,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                tell=notes.append,
            )
    except UnclearError as error:
        _print_features(error.described)
        raise
    except DamagedFilesError as error:
        for fault in error.faults[:FAULTS_SHOWN]:
            print(f"fault: {fault}")
        if len(error.faults) > FAULTS_SHOWN:
            print(f"and {len(error.faults) - FAULTS_SHOWN:,} more")
        raise
    for note in notes:
        print(f"tfdist: {note}")
    folder, console = _folder(source, out), stdout()
    voice.result(folder=folder, splits=voice.splits(manifest))
    console.print(schema_table(manifest.schema))
    console.print(splits_table(manifest))
    console.print(f"next: tfdist inspect {folder} --check")


def _folder(source: Sequence[str], out: Path | None) -> Path | str:
    """Returns the folder of the manifest."""
    from tfdist.records.adopting.file_patterns import find_files

    if url := url_of(source[0]):
        return url
    if out is not None or (len(source) == 1 and Path(source[0]).is_dir()):
        return out or Path(source[0])
    return find_files(source).folder


def _print_features(described: Sequence[Described]) -> None:
    table = table_of("found", ("feature", "kind", "shape", "example"), ())
    for item in described:
        kind = item.kind if item.problem is None else f"{item.kind}, with {item.problem}"
        table.add_row(item.name, kind, item.shown_shape, item.found.example)
    stdout().print(table)
