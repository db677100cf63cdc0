"""Writing a folder of TFRecord shards: all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist import __version__
from tfdist.errors import DataError, OptionError, unknown_choice
from tfdist.records.columns import Columns
from tfdist.records.manifest import COMPRESSIONS, Manifest, ShardInfo, SplitInfo
from tfdist.records.sources import open_source
from tfdist.records.splits import DEFAULT_SPLIT, assign, cut_shards, parse_split
from tfdist.records.wire import make_framer, make_layout

GZIP_LEVEL = 6
_GZIP_WINDOW_BITS = 31
_SUFFIX = {"none": ".tfrecord", "gzip": ".tfrecord.gz"}

Progress = Callable[[int, int], None]


def write(
    source: Any,
    out: str | Path,
    *,
    num_shards: int = 4,
    split: str | Mapping[str, float] = DEFAULT_SPLIT,
    stratify: bool = False,
    seed: int = 0,
    compression: str = "none",
    workers: int = 1,
    label: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Writes TFRecord shards of tf.train.Examples and their manifest.json into a new folder.

    Args:
        source: what to write, see ``sources.open_source``.
        out: the folder; it does not exist yet, or is empty.
        num_shards: number of shards of each split. The first split must have that many records;
            a smaller later one gets a shard for each record.
        split: shares by name, "train=5,validation=1" or a mapping.
        stratify: whether every split gets the proportions of the classes.
        seed: of the shuffle that precedes the split; the records of a split stay shuffled.
        compression: "none" or "gzip".
        workers: number of threads. Copying, checksums of files, compression and writing run
            outside Python's lock.
        label: the label's column of a .csv, or its array in a .npz.
        progress: called with (records written, records in all) now and then, from any thread.

    Returns:
        The manifest that was written.

    Raises:
        OptionError: an option that cannot hold.
        DataError: a source that cannot be written, or a folder that is not empty. Nothing is left
            of a folder that could not be finished, on Ctrl-C and SIGTERM too.
    """
    _check_options(num_shards, seed, compression, workers)
    shares = parse_split(split)
    out = Path(out).resolve()
    _check_free(out)
    columns = open_source(source, label)
    class_ids = columns.class_ids()
    if stratify and class_ids is None:
        raise DataError("stratify needs one label of class ids", received="no class ids")
    rows = assign(columns.num_records, shares, seed, class_ids if stratify else None)
    first, first_rows = next(iter(rows.items()))
    if len(first_rows) < num_shards:
        raise DataError(
            f"split '{first}' has at least one record for each shard",
            received=f"{len(first_rows)} records for {num_shards} shards",
            mend="Choose fewer shards",
        )
    shards = _plan(rows, num_shards, compression)
    try:
        with _staging_folder(out) as folder, _stop_on_sigterm():
            infos = _write_shards(folder, columns, shards, compression, workers, progress)
            manifest = Manifest(
                schema=columns.schema,
                splits=_summarise(columns, rows, infos),
                layout=make_layout(columns.schema, columns.varint_widths()),
                source=columns.kind,
                seed=seed,
                stratified=stratify,
                compression=compression,
                written_by=f"tfdist {__version__}",
            )
            manifest.save(folder)
    except OSError as error:
        raise DataError(f"{out} can be written", received=str(error)) from error
    return manifest


def _check_options(num_shards: int, seed: int, compression: str, workers: int) -> None:
    for name, value, least in (("num_shards", num_shards, 1), ("workers", workers, 1)):
        if value < least:
            raise OptionError(f"{name} is at least {least}", received=value)
    if seed < 0:
        raise OptionError("seed is 0 or more", received=seed)
    if compression not in COMPRESSIONS:
        raise unknown_choice("compression", compression, COMPRESSIONS)


def _check_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            "shards are written to a new or empty folder",
            received=f"{out}, which exists",
            mend="Choose another folder, or remove this one first",
        )


def _plan(
    rows: Mapping[str, np.ndarray], num_shards: int, compression: str
) -> dict[str, dict[str, np.ndarray]]:
    """Returns split -> file name -> the numbers of its records."""
    plan = {}
    for name, split_rows in rows.items():
        count = min(num_shards, len(split_rows))
        plan[name] = {
            f"{name}-{number:05d}-of-{count:05d}{_SUFFIX[compression]}": shard_rows
            for number, shard_rows in enumerate(cut_shards(split_rows, count))
        }
    return plan


def _summarise(
    columns: Columns, rows: Mapping[str, np.ndarray], infos: Mapping[str, list[ShardInfo]]
) -> dict[str, SplitInfo]:
    class_ids = columns.class_ids()
    splits = {}
    for name, shards in infos.items():
        counts = None
        if class_ids is not None:
            ids, numbers = np.unique(class_ids[rows[name]], return_counts=True)
            counts = dict(zip(ids.tolist(), numbers.tolist(), strict=True))
        splits[name] = SplitInfo(shards=tuple(shards), class_counts=counts)
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
    shards: Mapping[str, Mapping[str, np.ndarray]],
    compression: str,
    workers: int,
    progress: Progress | None,
) -> dict[str, list[ShardInfo]]:
    stopping = threading.Event()
    counter = _Counter(columns.num_records, progress)
    widths = columns.varint_widths()

    def write_one(file: str, rows: np.ndarray) -> ShardInfo:
        framer = make_framer(columns.schema, widths)
        with _ShardFile(folder / file, compression) as shard:
            for start in range(0, len(rows), framer.block_records):
                if stopping.is_set():
                    break
                block_rows = rows[start : start + framer.block_records]
                shard.write(framer.frame(columns.block(block_rows)))
                counter.add(len(block_rows))
        return ShardInfo(
            file=file, records=len(rows), bytes=shard.bytes, checksum=f"{shard.checksum:08x}"
        )

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tfdist-writer")
    try:
        futures = {
            name: [pool.submit(write_one, file, rows) for file, rows in files.items()]
            for name, files in shards.items()
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
