"""tfdist inspect: what is in a folder of shards, and whether it is intact."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfdist.cli import completion, voice
from tfdist.cli.console import megabytes, progress_bar, stdout
from tfdist.errors import DataError, OptionError, TfdistError
from tfdist.records.report_text import table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from tfdist.records.clients.shard_store import ShardStore
    from tfdist.records.format.manifest import Manifest
    from tfdist.records.format.schema import Feature, Schema

EXIT_FAULTS = 1
_CLASSES_SHOWN = 20

_CLIENT_SHARDS_SHOWN = 20
_FITS = {"stretch": "stretched", "crop": "cropped", "pad": "padded"}

_EPILOG = """\b
Examples:
  tfdist inspect data/digits
  tfdist inspect data/digits --check
  tfdist inspect data/digits/validation
  tfdist inspect fed --plot label_skew.png
"""


@click.command("inspect", epilog=_EPILOG)
@click.argument(
    "path",
    metavar="OUT[/SPLIT]",
    type=click.Path(path_type=Path),
    shell_complete=completion.data,
)
@click.option(
    "--check",
    "check_bytes",
    is_flag=True,
    help="Read every byte, decode every image, and name each fault.",
)
@click.option(
    "--plot",
    metavar="PNG",
    type=click.Path(path_type=Path),
    help="Draw how records and classes are spread over the clients of federated learning.",
)
def command(path: Path, check_bytes: bool, plot: Path | None) -> int:
    """Shows the splits, the shards, the schema and the class balance of the folder OUT.

    OUT/SPLIT shows and checks that split alone.

    Of federated learning it shows the clients and how skewed their labels are: of shards that were
    written with --clients, or of a folder OUT that has a folder of shards for each client.

    With --check the exit code is 1 when anything is not as it was written.
    """
    from tfdist.records.format.manifest import has_client_folders, load_manifest

    console = stdout()
    folder, split = _folder_and_split(path)
    if not has_client_folders(folder):
        manifest = load_manifest(folder)
        if split is not None:
            manifest = replace(manifest, splits={split: manifest.splits[split]})
        stores = _stores_of_splits(folder, manifest)
        elsewhere = f", shards in {manifest.shard_folder(folder)}" if manifest.shards_in else ""
        console.print(
            f"{folder}: from {manifest.source}, seed {manifest.seed}, "
            f"{'stratified, ' if manifest.stratified else ''}compression {manifest.compression}, "
            f"written by {manifest.written_by}{elsewhere}"
        )
        tables = _tables(manifest, stores)
        voice.result(folder=folder, splits=voice.splits(manifest))
    else:
        stores = _stores_of_folders(folder)
        if split is not None:
            stores = {split: stores[split]}
        console.print(f"{folder}: a folder of shards for each client")
        tables = _tables_of_clients(stores)
    for table in tables:
        console.print(table)
    if plot is not None:
        _plot(folder, stores, plot)
        console.print(f"plot: {plot}")
    return EXIT_FAULTS if check_bytes and not _check(folder, split) else 0


def _folder_and_split(path: Path) -> tuple[Path, str | None]:
    """Returns the folder of OUT or OUT/SPLIT, and the split; None for all.

    Raises:
        DataError: OUT has no such split.
    """
    from tfdist.records.buckets.cache import local_shards
    from tfdist.records.format.manifest import (
        MANIFEST_NAME,
        has_client_folders,
        is_split_beside,
        load_manifest,
    )

    path = local_shards(path)
    if path.exists() and not is_split_beside(path):
        return path, None
    if (path.parent / MANIFEST_NAME).is_file():
        known = list(load_manifest(path.parent).splits)
    elif has_client_folders(path.parent) and path.name in _stores_of_folders(path.parent):
        return path.parent, path.name
    else:
        return path, None
    if path.name not in known:
        raise DataError(
            f"the split must be one of {', '.join(known)} in {path.parent}",
            received=repr(path.name),
            mend=f"Write {path.parent / known[0]}, or another of these",
        )
    return path.parent, path.name


def _check(folder: Path, split: str | None) -> bool:
    """Reads every byte, prints each fault, and returns whether there is none."""
    from tfdist.records.format.checking import check

    files = _shards(folder, split)
    with progress_bar("bytes") as bar:
        # What is wrong with a file is a fault, told later.
        total = sum(file.stat().st_size for file in files if file.is_file())
        task = bar.add_task("Checking", total=total)
        faults = check(
            folder, split, progress=lambda num_bytes: bar.advance(task, num_bytes), decode=True
        )
    voice.result(faults=faults)
    console = stdout()
    for fault in faults:
        console.print(f"fault: {fault}")
    if faults:
        console.print(f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}")
    else:
        console.print(f"clean: every byte of {len(files)} shards is as it was written")
    return not faults


def _shards(folder: Path, split: str | None) -> list[Path]:
    """Returns the files of a split, or of all, of a folder of shards or of one for each client."""
    from tfdist.records.format.manifest import MANIFEST_NAME, client_folders, load_manifest

    files = []
    is_one = (folder / MANIFEST_NAME).is_file()
    for place in [folder] if is_one else client_folders(folder):
        with contextlib.suppress(TfdistError):  # A client that cannot be read is a fault.
            manifest = load_manifest(place)
            shards = manifest.shard_folder(place)
            splits = manifest.splits if split is None else {split: manifest.splits.get(split)}
            files += [shards / s.file for info in splits.values() if info for s in info.shards]
    return files


def _stores_of_splits(folder: Path, manifest: Manifest) -> dict[str, ShardStore]:
    """Returns the clients of each split that has some."""
    from tfdist.records.clients.shard_store import ShardStore

    return {
        name: ShardStore.of_split(folder, name, manifest)
        for name, split in manifest.splits.items()
        if split.has_clients
    }


def _stores_of_folders(root: Path) -> dict[str, ShardStore]:
    """Returns the clients of each split that any client's folder has."""
    from tfdist.records.clients.shard_store import ShardStore
    from tfdist.records.format.manifest import client_folders, load_manifest

    splits: dict[str, None] = {}
    failure = None
    for client in client_folders(root):
        try:
            splits |= dict.fromkeys(load_manifest(client).splits)
        except DataError as error:
            failure = error
    if not splits:
        assert failure is not None
        raise failure
    return {name: ShardStore.of_folders(root, name) for name in splits}


def _plot(folder: Path, stores: dict[str, ShardStore], path: Path) -> None:
    if not stores:
        raise OptionError(
            "data for --plot must be divided into clients of federated learning",
            received=f"{folder}, which has none",
            mend="Write them with `tfdist shard SOURCE OUT --clients N`",
        )
    # The first split is the one that is trained on.
    next(iter(stores.values())).skew().plot(path)


def _tables(manifest: Manifest, stores: dict[str, ShardStore]) -> Iterator[Table]:
    yield schema_table(manifest.schema)
    yield splits_table(manifest)
    if manifest.left_out:
        yield _left_out_table(manifest)
    if manifest.schema.class_label is not None:
        yield _classes_table(manifest)
    for store in stores.values():
        yield from store.skew().tables()
    yield _shards_table(manifest)


def _tables_of_clients(stores: dict[str, ShardStore]) -> Iterator[Table]:
    first = next(iter(stores.values()))
    yield schema_table(first.schema)
    for name, store in stores.items():
        for table in store.skew().tables():
            table.title = f"{name}: {table.title}"
            yield table
        if store.errors:
            unreadable = table_of(f"{name}: clients that cannot be read", ("client", "reason"), ())
            for client, error in store.errors.items():
                unreadable.add_row(client, str(error))
            yield unreadable


def schema_table(schema: Schema) -> Table:
    from tfdist.records.format.schema import AS_STORED

    titles = ("feature", "role", "dtype", "shape", "encoding", "names")
    is_changed = any(feature.reading != AS_STORED for feature in schema.features)
    table = table_of("schema", (*titles, "read as") if is_changed else titles, ())
    for feature in schema.features:
        names = feature.classes or feature.columns or ()
        shown = ", ".join(names[:_CLASSES_SHOWN])
        if len(names) > _CLASSES_SHOWN:
            shown += f" and {len(names) - _CLASSES_SHOWN} more"
        shape = feature.shown_shape
        cells = (feature.name, feature.role, feature.dtype, shape, feature.encoding, shown)
        table.add_row(*cells, *([_read_as(feature)] if is_changed else []))
    return table


def _read_as(feature: Feature) -> str:
    """Returns what becomes of a feature when it is read."""
    reading = feature.reading
    said = []
    if reading.upright:
        said.append("upright")
    if reading.size is not None:
        said.append(f"{reading.size[0]}x{reading.size[1]}, {_FITS[reading.fit]}")
    if reading.channels is not None:
        said.append({1: "gray", 3: "rgb"}[reading.channels])
    if reading.length is not None:
        said.append(f"{reading.length} entries")
    if reading.fill:
        said.append(f"filled with {reading.fill:g}")
    if reading.offset:
        said.append(f"{reading.offset} subtracted")
    return ", ".join(said)


def splits_table(manifest: Manifest) -> Table:
    table = table_of("splits", ("split",), ("records", "share", "shards", "size"))
    total = sum(split.records for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        share = f"{split.records / total:.1%}"
        size = megabytes(split.bytes)
        table.add_row(name, f"{split.records:,}", share, str(len(split.shards)), size)
    return table


def _left_out_table(manifest: Manifest) -> Table:
    table = table_of("left out of the source", ("why",), ("records",))
    for why, count in manifest.left_out.items():
        table.add_row(why, f"{count:,}")
    return table


def _classes_table(manifest: Manifest) -> Table:
    label = manifest.schema.class_label
    assert label is not None
    table = table_of(f"classes of '{label.name}'", ("class",), tuple(manifest.splits))
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
    table = table_of("shards", ("file",), ("records", "bytes", "crc32c"))
    for split in manifest.splits.values():
        shown = split.shards[:_CLIENT_SHARDS_SHOWN] if split.has_clients else split.shards
        for shard in shown:
            table.add_row(shard.file, f"{shard.records:,}", f"{shard.bytes:,}", shard.checksum)
        if len(shown) < len(split.shards):
            table.add_row(f"and {len(split.shards) - len(shown):,} more, one for each client")
    return table
