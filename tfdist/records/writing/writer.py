"""Writing a folder of TFRecord shards: all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist import __version__
from tfdist.errors import DataError, OptionError, unknown_choice
from tfdist.records.clients.dealing import Partition, check_num_clients, deal, parse_partition
from tfdist.records.format.columns import Columns, count_classes
from tfdist.records.format.encoding import make_framer, make_layout
from tfdist.records.format.manifest import COMPRESSIONS, Manifest, ShardInfo, SplitInfo
from tfdist.records.format.splits import DEFAULT_SPLIT, assign, cut_shards, parse_split
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

DEFAULT_NUM_SHARDS = 4
GZIP_LEVEL = 6
_GZIP_WINDOW_BITS = 31
_SUFFIX = {"none": ".tfrecord", "gzip": ".tfrecord.gz"}

Progress = Callable[[int, int], None]


def write(
    source: Any,
    out: str | Path,
    *,
    num_shards: int | None = None,
    split: str | Mapping[str, float] = DEFAULT_SPLIT,
    stratify: bool = False,
    seed: int = 0,
    compression: str = "none",
    workers: int = 1,
    label: str | Sequence[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    clients: int | None = None,
    partition: str | None = None,
    batched: bool | None = None,
    decode: bool = True,
    progress: Progress | None = None,
    opened: Callable[[Columns], None] | None = None,
) -> Manifest:
    """Writes TFRecord shards of tf.train.Examples and their manifest.json into a new folder.

    Args:
        source: what to write, see ``raw_sources.read_raw``.
        out: the folder; it does not exist yet, or is empty.
        num_shards: number of shards of each split, 4 when None. The first split must have that
            many records; a smaller later one gets a shard for each record. Not for a split with
            clients, which has a shard for each.
        split: shares by name, "train=5,validation=1" or a mapping.
        stratify: whether every split gets the proportions of the classes.
        seed: of the shuffle that precedes the split; the records of a split stay shuffled.
        compression: "none" or "gzip".
        workers: number of threads. Copying, checksums of files, compression and writing run
            outside Python's lock.
        label: the label's column of a .csv, or its array in a .npz; or several, as a list or
            separated by commas.
        inputs: the inputs, likewise; what is neither is left out. None: all that is not a label.
        drop: what to leave out, likewise.
        clients: number of clients of federated learning that the records of the first split are
            dealt to; the other splits stay whole.
        partition: how they are dealt: "iid", which None means too, "dirichlet:ALPHA" or
            "shards:K", see ``partition``; or "by:COLUMN", which needs no ``clients``: each value of
            the column is one, see ``raw_sources.read_raw``.
        batched: whether the elements of a dataset are batches; None finds out.
        decode: whether images that are kept byte for byte are decoded, to see that they can be.
        progress: called with (records written, records in all) now and then, from any thread.
        opened: called with the columns of the source before anything is written.

    Returns:
        The manifest that was written.

    Raises:
        OptionError: an option that cannot hold.
        DataError: a source that cannot be written, or a folder that is not empty. Nothing is left
            of a folder that could not be finished, on Ctrl-C and SIGTERM too.
    """
    dealt = _check_clients(clients, partition, num_shards)
    num_shards = DEFAULT_NUM_SHARDS if num_shards is None else num_shards
    _check_options(num_shards, seed, compression, workers)
    shares = parse_split(split)
    out = Path(out).resolve()
    _check_free(out, source)
    client = None if dealt is None else dealt.column
    asked = Asked(label=label, inputs=inputs, drop=drop, client=client)
    columns = read_raw(source, asked, batched=batched)
    if opened is not None:
        opened(columns)
    for column in columns.columns.values():
        if hasattr(column, "are_decoded"):
            column.are_decoded = decode
    class_ids = columns.class_ids()
    if stratify and class_ids is None:
        raise DataError(
            "data to stratify must have one label of class ids", received="no class ids"
        )
    rows = assign(columns.num_records, shares, seed, class_ids if stratify else None)
    if dealt is None:
        _check_enough(rows, num_shards)
        plan = _plan(rows, num_shards, compression)
    else:
        owned = _deal(columns, dealt, next(iter(rows.values())), clients, seed)
        plan = _plan(rows, num_shards, compression, owned)
    try:
        with _staging_folder(out) as folder, _stop_on_sigterm():
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
            )
            manifest.save(folder)
    except OSError as error:
        raise DataError(
            f"{out} must be writable", received=f"an error: {error.strerror or error}"
        ) from error
    return manifest


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
    num_shards: int,
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
            cut = cut_shards(split_rows, min(num_shards, len(split_rows)))
            clients = [None] * len(cut)
        else:
            cut, clients = list(owned.values()), list(owned)
        plan[name] = [
            _Shard(
                f"{name}-{number:05d}-of-{len(cut):05d}{_SUFFIX[compression]}", shard_rows, client
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


@contextlib.contextmanager
def _staging_folder(out: Path) -> Iterator[Path]:
    """Gives a folder beside ``out`` that becomes ``out`` at the end, or vanishes on any error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
        # Replaces an empty folder in one step; fails when another writer was faster.
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that it unwinds like Ctrl-C; a user's own handler stays."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _write_shards(
    folder: Path,
    columns: Columns,
    plan: Mapping[str, list[_Shard]],
    compression: str,
    workers: int,
    progress: Progress | None,
) -> dict[str, list[ShardInfo]]:
    stopping = threading.Event()
    counter = _Counter(columns.num_records, progress)
    widths = columns.varint_widths()
    class_ids = columns.class_ids()
    of_thread = threading.local()

    def write_one(shard: _Shard) -> ShardInfo:
        # Its block is made once: there may be 10,000 small shards.
        if not hasattr(of_thread, "framer"):
            of_thread.framer = make_framer(columns.schema, widths)
        framer = of_thread.framer
        with _ShardFile(folder / shard.file, compression) as file:
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


class _Counter:
    """Adds up the progress of all threads."""

    def __init__(self, total: int, progress: Progress | None):
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, records: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += records
                self._progress(self._done, self._total)


class _ShardFile:
    """A file that counts and sums its bytes as they are written."""

    def __init__(self, path: Path, compression: str):
        self.bytes = 0
        self.checksum = 0
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._compress = (
            zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
            if compression == "gzip"
            else None
        )

    def write(self, data: bytes | memoryview) -> None:
        self._put(data if self._compress is None else self._compress.compress(data))

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self.bytes += len(view)
        self.checksum = crc32c(view, self.checksum)
        # A raw write may take less than it is given.
        while view:
            view = view[self._file.write(view) :]

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        with self._file:
            if kind is None and self._compress is not None:
                self._put(self._compress.flush())
