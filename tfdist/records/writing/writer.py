"""Writing a folder of TFRecord shards: all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import __version__
from tfdist.errors import DataError, OptionError, unknown_choice
from tfdist.records.clients.dealing import Partition, check_num_clients, deal, parse_partition
from tfdist.records.format.columns import Columns, count_classes
from tfdist.records.format.encoding import make_framer, make_layout
from tfdist.records.format.manifest import COMPRESSIONS, Manifest, ShardInfo, SplitInfo
from tfdist.records.format.offsets import write_offsets
from tfdist.records.format.readings import with_readings
from tfdist.records.format.schema import Schema
from tfdist.records.format.splits import DEFAULT_SPLIT, assign, cut_shards, parse_split
from tfdist.records.writing.images.options import image_options
from tfdist.records.writing.places import on_this_machine
from tfdist.records.writing.raw_sources import check_no_table, owned_columns, read_raw
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.shard_files import (
    SUFFIX,
    Counter,
    Progress,
    ShardFile,
    staging_folder,
    stop_on_sigterm,
)
from tfdist.records.writing.shard_folders import (
    ShardFolder,
    find_shards,
    refuse_for_shards,
    write_shards_anew,
)
from tfdist.records.writing.shard_sizes import frame_bytes, shards_for
from tfdist.records.writing.streams.sources import open_stream
from tfdist.records.writing.streams.stream import Stream
from tfdist.records.writing.streams.writer import (
    HEAD_BYTES,
    Head,
    SourceFailedError,
    read_head,
    write_stream,
)


@on_this_machine
def write(
    source: Any,
    out: str | Path,
    *,
    num_shards: int | None = None,
    split: str | Mapping[str, float] | None = None,
    stratify: bool = False,
    seed: int = 0,
    compression: str = "none",
    workers: int = 1,
    label: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    weight: str | None = None,
    text: str | Sequence[str] | None = None,
    categories: str | Sequence[str] | None = None,
    missing: str | float | None = None,
    clients: int | None = None,
    partition: str | None = None,
    batched: bool | None = None,
    decode: bool = True,
    resize: str | tuple[int, int] | None = None,
    fit: str | None = None,
    color: str | None = None,
    write_resized: bool = False,
    labels: str | Path | None = None,
    masks: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
    opened: Callable[[Columns], None] | None = None,
) -> Manifest:
    """Writes TFRecord shards of tf.train.Examples and their manifest.json into a new folder.

    Args:
        source: what to write, see ``raw_sources.read_raw``; or what is read once, in memory that
            does not grow with it, see ``streams.sources``.
        out: the folder; it does not exist yet, or is empty. Source and folder may be URLs of
            buckets, such as s3://BUCKET/FOLDER.
        num_shards: number of shards of each split; None: shards of 100 to 200 MB, and 4 at
            least. The first split must have that many records; a smaller later one gets a shard for
            each record. Not for a split with clients, which has a shard for each.
        split: shares by name, "train=5,validation=1" or a mapping. None: those that the source
            has, as a folder of train/CLASS and val/CLASS does, else "train=5,validation=1".
        stratify: whether every split gets the proportions of the classes.
        seed: of the shuffle that precedes the split; the records of a split stay shuffled.
        compression: "none" or "gzip".
        workers: number of threads. Copying, checksums of files, compression and writing run
            outside Python's lock.
        label: the label's column of a table, or its array in a .npz; or several, as a list or
            separated by commas.
        inputs: the inputs, likewise; what is neither is left out. None: all that is not a label.
        drop: what to leave out, likewise.
        weight: the sample weight; None: "sample_weight", where there is one.
        text: columns of a table that are text, whatever they look like.
        categories: columns of a table that become numbers of the sorted values. Of the others,
            text of at most 1,000 different values in fewer than half of the rows does.
        missing: what becomes of missing values of a table: "drop" leaves their rows out, "mean",
            "median" or a number takes their place (and "" that of text), "mask" gives 0 and a
            second input "missing", uint8 [columns], that is 1 there. None refuses them.
        clients: number of clients of federated learning that the records of the first split are
            dealt to; the other splits stay whole.
        partition: how they are dealt: "iid", which None means too, "dirichlet:ALPHA" or
            "shards:K", see ``partition``; or "by:COLUMN", which needs no ``clients``: each value of
            the column is one, see ``raw_sources.read_raw``.
        batched: whether the elements of a dataset or a generator are batches; None finds out.
        decode: whether images are decoded before they are written, to see that they can be.
        resize: the size, "HxW" or (height, width), that images are read in: their files are kept
            as they are, and another can be said later.
        fit: how they get there: "stretch", which None means too, "crop" or "pad"; see
            ``schema.Reading``.
        color: "rgb" or "gray": what all images are read as; not their masks.
        write_resized: whether images are written anew in that size, instead of read in it.
        labels: of a folder of images, a CSV or JSON lines file with a row for each; see
            ``images.folders``.
        masks: likewise, a folder of masks, which are called as their images are.
        skip_bad: whether rows, texts and images that cannot be read, and images that lack a row or
            a mask, are left out, which is told.
        progress: called with (records written, records in all) now and then, from any thread; of a
            stream whose length is not known with None for all.
        opened: called with the columns of the source before anything is written. None: what is to
            be told of the source, as what was left out, is printed.

    Returns:
        The manifest that was written.

    Raises:
        OptionError: an option that cannot hold.
        DataError: a source that cannot be written, or a folder that is not empty. Nothing is left
            of a folder that could not be finished, on Ctrl-C and SIGTERM too.
    """
    dealt = _check_clients(clients, partition, num_shards)
    _check_options(1 if num_shards is None else num_shards, seed, compression, workers)
    shares = None if split is None else parse_split(split)
    out = Path(out).resolve()
    _check_free(out, source)
    client = None if dealt is None else dealt.column
    asked = Asked(
        label=label,
        inputs=inputs,
        drop=drop,
        weight=weight,
        client=client,
        text=text,
        categories=categories,
        missing=missing,
        skip_bad=skip_bad,
    )
    images = image_options(
        resize=resize,
        fit=fit,
        color=color,
        write_resized=write_resized,
        labels=labels,
        masks=masks,
        skip_bad=skip_bad,
        decode=decode,
        workers=workers,
    )
    if write_resized:
        resize = fit = None
    shards = find_shards(source)
    stream = open_stream(source, asked, batched) if shards is None else None
    if shards is not None or stream is not None:
        images.check_unused(source)
        check_no_table(source, asked)

    def as_read(schema: Schema) -> Schema:
        return with_readings(schema, resize=resize, fit=fit, color=color)

    if shards is not None:
        return _write_shards_anew(
            shards,
            out,
            opened,
            {
                "stratify": stratify,
                "clients and partition": dealt is not None,
                "label, inputs and drop": asked.names_columns,
                "batched": batched is not None,
            },
            shares=shares,
            num_shards=num_shards,
            seed=seed,
            compression=compression,
            progress=progress,
            as_read=as_read,
        )
    if stream is None:
        columns = read_raw(source, asked, images=images, batched=batched)
    else:
        head = read_head(stream, decode=decode)
        if not head.is_whole:
            return _write_stream(
                stream,
                head,
                out,
                shares=shares,
                num_shards=num_shards,
                seed=seed,
                compression=compression,
                progress=progress,
                as_read=as_read,
                opened=opened,
                refused={"stratify": stratify, "clients and partition": dealt is not None},
            )
        columns = owned_columns(head.columns(), client)
    columns = replace(columns, schema=as_read(columns.schema))
    if opened is not None:
        opened(columns)
    else:
        for note in columns.notes:
            print(f"tfdist: {note}", flush=True)
    class_ids = columns.class_ids()
    if stratify and class_ids is None:
        raise DataError(
            "data to stratify must have one label of class ids", received="no class ids"
        )
    rows = _divide(columns, shares, seed, class_ids if stratify else None)
    if dealt is None:
        counts = _num_shards(columns, rows, num_shards)
        _check_enough(rows, next(iter(counts.values())))
        plan = _plan(rows, counts, compression)
    else:
        owned = _deal(columns, dealt, next(iter(rows.values())), clients, seed)
        plan = _plan(rows, _num_shards(columns, rows, None), compression, owned)
    with _said_of(out), staging_folder(out) as folder, stop_on_sigterm():
        infos = _write_shards(folder, columns, plan, compression, workers, progress)
        manifest = Manifest(
            schema=columns.schema,
            splits=_summarise(columns, rows, infos, None if dealt is None else str(dealt)),
            layout=make_layout(columns.schema, columns.varint_widths()),
            source=columns.kind,
            seed=seed,
            stratified=stratify,
            compression=compression,
            written_by=f"tfdist {__version__}",
            left_out=columns.left_out,
        )
        write_offsets(folder, manifest)
        manifest.save(folder)
    return manifest


def _write_shards_anew(
    source: ShardFolder,
    out: Path,
    opened: Callable[[Columns], None] | None,
    refused: Mapping[str, bool],
    **options: Any,
) -> Manifest:
    refuse_for_shards(refused)
    if opened is not None:
        opened(source.columns())
    with _said_of(out):
        return write_shards_anew(source, out, **options)


def _write_stream(
    stream: Stream,
    head: Head,
    out: Path,
    *,
    shares: Mapping[str, float] | None,
    opened: Callable[[Columns], None] | None,
    refused: Mapping[str, bool],
    **options: Any,
) -> Manifest:
    """Writes a stream of more records than are held in memory."""
    for name, is_asked in refused.items():
        if is_asked:
            raise OptionError(
                f"{name} must go with a source whose records are all known",
                received=f"a stream of more than {HEAD_BYTES >> 20} MB, which is read once",
                mend="Give it as arrays or as a folder, or write the stream without, and then "
                "arrays of what you need",
            )
    if stream.splits is not None and shares is None:
        shares = dict.fromkeys(stream.splits, 1.0)
    shares = parse_split(DEFAULT_SPLIT) if shares is None else shares
    if opened is not None:
        # What is found while it is written is added to these notes.
        opened(replace(head.features.columns(), notes=stream.notes))
    try:
        with _said_of(out):
            manifest = write_stream(stream, head, out, shares=shares, **options)
    except SourceFailedError as error:
        raise error.__cause__ from None
    for note in stream.notes if opened is None else ():
        print(f"tfdist: {note}", flush=True)
    return manifest


@contextlib.contextmanager
def _said_of(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out} must be writable", received=f"an error: {error.strerror or error}"
        ) from error


def _check_clients(
    clients: int | None, partition: str | None, num_shards: int | None
) -> Partition | None:
    """Returns the partition; None when no clients are asked for."""
    if clients is None and partition is None:
        return None
    dealt = parse_partition("iid" if partition is None else partition)
    check_num_clients(dealt, clients)
    if num_shards is not None:
        raise OptionError(
            "every client must have one shard",
            received=f"num_shards {num_shards} beside clients",
            mend="Leave the number of shards out",
        )
    return dealt


def _divide(
    columns: Columns,
    shares: Mapping[str, float] | None,
    seed: int,
    class_ids: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Returns the numbers of the records of each split, shuffled.

    Args:
        class_ids: of each record, to give every split the proportions of the classes; else None.
    """
    if columns.splits is None or shares is not None:
        shares = shares or parse_split(DEFAULT_SPLIT)
        return assign(columns.num_records, shares, seed, class_ids)
    random = np.random.default_rng(seed)
    return {name: random.permutation(rows) for name, rows in columns.splits.items()}


def _num_shards(
    columns: Columns, rows: Mapping[str, np.ndarray], told: int | None
) -> dict[str, int]:
    """Returns the number of shards of each split."""
    if told is not None:
        return dict.fromkeys(rows, told)
    size = frame_bytes(columns)
    return {name: shards_for(len(split_rows) * size) for name, split_rows in rows.items()}


def _check_enough(rows: Mapping[str, np.ndarray], num_shards: int) -> None:
    first, first_rows = next(iter(rows.items()))
    if len(first_rows) < num_shards:
        raise DataError(
            f"split '{first}' must have at least one record for each shard",
            received=f"{len(first_rows)} records for {num_shards} shards",
            mend="Choose fewer shards",
        )


def _check_options(num_shards: int, seed: int, compression: str, workers: int) -> None:
    for name, value, least in (("num_shards", num_shards, 1), ("workers", workers, 1)):
        if value < least:
            raise OptionError(f"{name} must be at least {least}", received=value)
    if seed < 0:
        raise OptionError("seed must be 0 or more", received=seed)
    if compression not in COMPRESSIONS:
        raise unknown_choice("compression", compression, COMPRESSIONS)


def _check_free(out: Path, source: Any) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            "shards must be written to a new or empty folder",
            received=f"{out}, which {'holds something' if out.is_dir() else 'is a file'}",
            mend="Choose another folder",
        )
    if isinstance(source, str | os.PathLike) and Path(source).resolve() in out.parents:
        raise DataError(
            "shards must not be written into their own source",
            received=f"{out}, inside of {source}",
            mend="Choose a folder beside it",
        )


@dataclass(frozen=True)
class _Shard:
    """A file to write: the numbers of its records, int64 [n], and whose they are."""

    file: str
    rows: np.ndarray
    client: str | None = None


def _deal(
    columns: Columns, partition: Partition, rows: np.ndarray, clients: int | None, seed: int
) -> dict[str, np.ndarray]:
    """Returns for each client the numbers of its records, which are some of ``rows``."""
    class_ids, owners = columns.class_ids(), columns.owners
    dealt = deal(
        partition,
        len(rows),
        clients,
        seed=seed,
        class_ids=None if class_ids is None else class_ids[rows],
        values=None if owners is None else owners[rows],
    )
    return {client: rows[part] for client, part in dealt.items()}


def _plan(
    rows: Mapping[str, np.ndarray],
    num_shards: Mapping[str, int],
    compression: str,
    owned: Mapping[str, np.ndarray] | None = None,
) -> dict[str, list[_Shard]]:
    """Returns the shards of each split.

    Args:
        owned: for the first split, the records of each client.
    """
    plan = {}
    for name, split_rows in rows.items():
        if owned is None or plan:
            cut = cut_shards(split_rows, min(num_shards[name], len(split_rows)))
            clients = [None] * len(cut)
        else:
            cut, clients = list(owned.values()), list(owned)
        plan[name] = [
            _Shard(
                f"{name}-{number:05d}-of-{len(cut):05d}{SUFFIX[compression]}", shard_rows, client
            )
            for number, (shard_rows, client) in enumerate(zip(cut, clients, strict=True))
        ]
    return plan


def _summarise(
    columns: Columns,
    rows: Mapping[str, np.ndarray],
    infos: Mapping[str, list[ShardInfo]],
    partition: str | None,
) -> dict[str, SplitInfo]:
    class_ids = columns.class_ids()
    splits = {}
    for name, shards in infos.items():
        splits[name] = SplitInfo(
            shards=tuple(shards),
            class_counts=None if class_ids is None else count_classes(class_ids[rows[name]]),
            partition=None if shards[0].client is None else partition,
        )
    return splits


def _write_shards(
    folder: Path,
    columns: Columns,
    plan: Mapping[str, list[_Shard]],
    compression: str,
    workers: int,
    progress: Progress | None,
) -> dict[str, list[ShardInfo]]:
    stopping = threading.Event()
    counter = Counter(columns.num_records, progress)
    widths = columns.varint_widths()
    class_ids = columns.class_ids()
    of_thread = threading.local()

    def write_one(shard: _Shard) -> ShardInfo:
        # Its block is made once: there may be 10,000 small shards.
        if not hasattr(of_thread, "framer"):
            of_thread.framer = make_framer(columns.schema, widths)
        framer = of_thread.framer
        with ShardFile(folder / shard.file, compression) as file:
            for start in range(0, len(shard.rows), framer.block_records):
                if stopping.is_set():
                    break
                block_rows = shard.rows[start : start + framer.block_records]
                file.write(framer.frame(columns.block(block_rows)))
                counter.add(len(block_rows))
        counted = shard.client is not None and class_ids is not None
        return ShardInfo(
            file=shard.file,
            records=len(shard.rows),
            bytes=file.bytes,
            checksum=f"{file.checksum:08x}",
            client=shard.client,
            class_counts=count_classes(class_ids[shard.rows]) if counted else None,
        )

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tfdist-writer")
    try:
        futures = {
            name: [pool.submit(write_one, shard) for shard in shards]
            for name, shards in plan.items()
        }
        everything = [future for group in futures.values() for future in group]
        for future in wait(everything, return_when=FIRST_EXCEPTION).done:
            future.result()
        return {name: [future.result() for future in group] for name, group in futures.items()}
    finally:
        # Also on Ctrl-C: no thread may write into a folder that is being removed.
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)
