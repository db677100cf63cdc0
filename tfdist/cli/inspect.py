"""tfdist inspect: what is in a folder of shards, and whether it is intact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from tfdist.records.manifest import Manifest

EXIT_FAULTS = 1
_CLASSES_SHOWN = 20

_EPILOG = """\b
Examples:
  tfdist inspect data/digits
  tfdist inspect data/digits --check
"""


@click.command("inspect", epilog=_EPILOG, short_help="Show and check a folder of shards.")
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--check", "check_bytes", is_flag=True, help="Read every byte and name each fault.")
@click.pass_context
def command(ctx: click.Context, folder: Path, check_bytes: bool) -> None:
    """Shows the splits, the shards, the schema and the class balance of the folder OUT.

    With --check the exit code is 1 when anything is not as it was written.
    """
    from tfdist.cli.console import stdout
    from tfdist.records.manifest import load_manifest

    manifest = load_manifest(folder)
    console = stdout()
    console.print(
        f"{folder}: from {manifest.source}, seed {manifest.seed}, "
        f"{'stratified, ' if manifest.stratified else ''}compression {manifest.compression}, "
        f"written by {manifest.written_by}",
        soft_wrap=True,
    )
    for table in _tables(manifest):
        console.print(table)
    if not check_bytes:
        return
    faults = _check(folder, manifest)
    for fault in faults:
        console.print(f"fault: {fault}", soft_wrap=True)
    shards = sum(len(split.shards) for split in manifest.splits.values())
    if faults:
        console.print(f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}")
        ctx.exit(EXIT_FAULTS)
    console.print(f"clean: every byte of {shards} shards is as it was written")


def _check(folder: Path, manifest: Manifest) -> list:
    from tfdist.cli.console import progress_bar
    from tfdist.records.faults import check

    with progress_bar("bytes") as bar:
        total = sum(split.bytes for split in manifest.splits.values())
        task = bar.add_task("Checking", total=total)
        return check(folder, progress=lambda num_bytes: bar.advance(task, num_bytes))


def _tables(manifest: Manifest) -> Iterator[Table]:
    yield _schema_table(manifest)
    yield _splits_table(manifest)
    if manifest.schema.class_label is not None:
        yield _classes_table(manifest)
    yield _shards_table(manifest)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _schema_table(manifest: Manifest) -> Table:
    table = _table("schema", ("feature", "role", "dtype", "shape", "encoding", "names"), ())
    for feature in manifest.schema.features:
        names = feature.classes or feature.columns or ()
        shown = ", ".join(names[:_CLASSES_SHOWN])
        if len(names) > _CLASSES_SHOWN:
            shown += f" and {len(names) - _CLASSES_SHOWN} more"
        shape = str(list(feature.shape))
        table.add_row(feature.name, feature.role, feature.dtype, shape, feature.encoding, shown)
    return table


def _splits_table(manifest: Manifest) -> Table:
    from tfdist.cli.console import megabytes

    table = _table("splits", ("split",), ("records", "share", "shards", "size"))
    total = sum(split.records for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        share = f"{split.records / total:.1%}"
        size = megabytes(split.bytes)
        table.add_row(name, f"{split.records:,}", share, str(len(split.shards)), size)
    return table


def _classes_table(manifest: Manifest) -> Table:
    label = manifest.schema.class_label
    assert label is not None
    table = _table(f"classes of '{label.name}'", ("class",), tuple(manifest.splits))
    counts = [split.class_counts or {} for split in manifest.splits.values()]
    present = sorted({class_id for of_split in counts for class_id in of_split})
    class_ids = list(range(len(label.classes))) if label.classes else present
    for class_id in class_ids[:_CLASSES_SHOWN]:
        cells = [
            f"{of_split.get(class_id, 0):,} ({of_split.get(class_id, 0) / split.records:.1%})"
            for of_split, split in zip(counts, manifest.splits.values(), strict=True)
        ]
        table.add_row(label.classes[class_id] if label.classes else str(class_id), *cells)
    if len(class_ids) > _CLASSES_SHOWN:
        table.add_row(f"and {len(class_ids) - _CLASSES_SHOWN} more")
    return table


def _shards_table(manifest: Manifest) -> Table:
    table = _table("shards", ("file",), ("records", "bytes", "crc32c"))
    for split in manifest.splits.values():
        for shard in split.shards:
            table.add_row(shard.file, f"{shard.records:,}", f"{shard.bytes:,}", shard.checksum)
    return table
