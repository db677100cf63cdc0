"""Records of which all are known: which of them go into which shard, and those shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tfdist import __version__
from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.clients.partition import Partition, deal
from tfdist.records.format.columns import Columns, count_classes
from tfdist.records.format.encoding import make_framer, make_layout
from tfdist.records.format.manifest import Manifest, ShardInfo, SplitInfo
from tfdist.records.format.offsets import write_offsets
from tfdist.records.format.splits import (
    DEFAULT_SPLIT,
    assign,
    check_enough,
    cut_shards,
    parse_split,
)
from tfdist.records.parts import Part
from tfdist.records.writing.options import WriteOptions, cores
from tfdist.records.writing.processes import may_fork, run_in_processes, run_in_threads
from tfdist.records.writing.same_run import content_of
from tfdist.records.writing.shard_files import (
    Counter,
    ShardFile,
    frame_bytes,
    said_of,
    shard_name,
    shards_for,
    staging_folder,
    stop_on_sigterm,
)
from tfdist.records.writing.shard_parts import Note, write_note
from tfdist.records.writing.unfinished import Unfinished

_BYTES_AT_ONCE = 64 << 20


def write_columns(
    columns: Columns, out: Path, options: WriteOptions, run: Unfinished | None
) -> Manifest:
    """Writes records of which all are known; see ``writer.write``.

    Args:
        run: keeps what is written when the run is ended, and what an ended one has written; None:
            nothing is kept.
    """
    columns = replace(columns, schema=options.as_read(columns.schema))
    partition, class_ids = options.partition, columns.class_ids()
    if options.stratify and class_ids is None:
        raise DataError(
            "data to stratify must have one label of class ids",
            received="no class ids",
            mend=f"Leave {spelt('stratify', True)} out, or give one label of integers or text",
        )
    rows = columns.splits
    if not options.in_order:
        by_class = class_ids if options.stratify else None
        rows = _divide(columns, options.shares, options.seed, by_class)
    first, owned = next(iter(rows)), None
    if partition is not None:
        owned = _deal(columns, partition, rows[first], options.clients, options.seed)
    counts = _num_shards(columns, rows, options.num_shards)
    if owned is None:
        check_enough(first, len(rows[first]), counts[first])
    plan = _plan(rows, counts, options.compression, owned)
    whole: dict[str, ShardInfo] = {}
    if run is not None:
        # Files are known by their sizes and times; of what is in memory nothing else tells.
        content = "" if run.is_of_files else content_of(columns)
        with said_of(out):
            whole = run.whole(_fingerprint(columns, plan) + content)
    options.tell(columns if run is None else replace(columns, notes=[*columns.notes, *run.notes]))
    own = plan if options.part is None else _part_of(plan, options.part)
    staging = staging_folder(out) if run is None else run.staging()
    with said_of(out), staging as folder, stop_on_sigterm():
        note_whole = (lambda info: None) if run is None else run.note
        infos = _write_shards(folder, columns, own, options, whole, note_whole)
        manifest = Manifest(
            schema=columns.schema,
            splits={
                name: SplitInfo(
                    shards=tuple(shards),
                    class_counts=None
                    if class_ids is None
                    else count_classes(class_ids[rows[name]]),
                    partition=None if plan[name][0].client is None else str(partition),
                )
                for name, shards in infos.items()
            },
            layout=make_layout(columns.schema, columns.varint_widths),
            source=columns.kind,
            seed=options.seed,
            stratified=options.stratify,
            compression=options.compression,
            written_by=f"tfdist {__version__}",
            left_out=columns.left_out,
        )
        if options.part is None:
            write_offsets(folder, manifest)
            manifest.save(folder)
        else:
            note = Note(
                part=options.part.number,
                parts=options.part.parts,
                run=run.now,
                files={name: [shard.file for shard in shards] for name, shards in plan.items()},
                manifest=manifest.to_json(),
            )
            write_note(folder, note)
            manifest = note.manifest_of()
    return manifest


@dataclass(frozen=True)
class _Shard:
    """A file to write: the numbers of its records, int64 [n], and whose they are."""

    file: str
    rows: np.ndarray
    client: str | None = None


def _fingerprint(columns: Columns, plan: Mapping[str, list[_Shard]]) -> str:
    """Returns a text that is another one where other records go into any shard."""
    shards = [
        (shard.file, shard.client, crc32c(np.ascontiguousarray(shard.rows, np.int64)))
        for shards in plan.values()
        for shard in shards
    ]
    return repr((columns.kind, columns.schema, columns.varint_widths, shards))


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
    return {
        name: min(len(split_rows), shards_for(len(split_rows) * size))
        for name, split_rows in rows.items()
    }


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
            _Shard(shard_name(name, number, len(cut), compression), shard_rows, client)
            for number, (shard_rows, client) in enumerate(zip(cut, clients, strict=True))
        ]
    return plan


def _part_of(plan: Mapping[str, list[_Shard]], part: Part) -> dict[str, list[_Shard]]:
    """Returns each n-th shard of all splits, which differ in their sizes. Raises OptionError."""
    shards = [shard for shards in plan.values() for shard in shards]
    if part.parts > len(shards):
        raise OptionError(
            f"{spelt('part')} must divide shards into at most as many parts as there are shards",
            received=f"{part} of {len(shards):,} shards",
            mend=f"Use {len(shards):,} parts at most, or say more shards ({spelt('num_shards')})",
        )
    own = {shard.file for shard in shards[part.number - 1 :: part.parts]}
    return {name: [shard for shard in shards if shard.file in own] for name, shards in plan.items()}


def _write_shards(
    folder: Path,
    columns: Columns,
    plan: Mapping[str, list[_Shard]],
    options: WriteOptions,
    whole: Mapping[str, ShardInfo],
    note: Callable[[ShardInfo], None],
) -> dict[str, list[ShardInfo]]:
    """Writes the shards of a plan that are not ``whole`` yet, and notes each, from any thread."""
    jobs = [shard for shards in plan.values() for shard in shards]
    counter = Counter(sum(len(shard.rows) for shard in jobs), options.progress)
    left = [shard for shard in jobs if shard.file not in whole]
    for info in whole.values():
        counter.add(info.records)
    # Pillow and files work outside Python's lock; records are made within it.
    workers = options.workers or (cores() if columns.are_images else 1)
    by_processes = workers > 1 and not columns.are_images and may_fork()
    write = _Writer(folder, columns, options.compression)
    written = (run_in_processes if by_processes else run_in_threads)(
        left, write, count=workers, done=note, progress=counter.add
    )
    infos = {**whole, **{info.file: info for info in written}}
    return {name: [infos[shard.file] for shard in shards] for name, shards in plan.items()}


class _Writer:
    """Writes shards, in any thread or process."""

    def __init__(self, folder: Path, columns: Columns, compression: str):
        self._folder, self._columns, self._compression = folder, columns, compression
        self._class_ids = columns.class_ids()
        self._records_at_once = 1
        if columns.are_in_files:  # Where of many records some lie near each other.
            size = frame_bytes(columns)
            self._records_at_once = int(_BYTES_AT_ONCE // max(1, size))
        self._of_thread = threading.local()

    def __call__(self, shard: _Shard, progress: Callable[[int], None]) -> ShardInfo:
        # Its block is made once: there may be 10,000 small shards.
        if not hasattr(self._of_thread, "framer"):
            self._of_thread.framer = make_framer(self._columns.schema, self._columns.varint_widths)
        framer = self._of_thread.framer
        step, at_once = framer.block_records, max(framer.block_records, self._records_at_once)
        with ShardFile(self._folder / shard.file, self._compression) as file:
            for start in range(0, len(shard.rows), at_once):
                rows = shard.rows[start : start + at_once]
                block = self._columns.block(rows)
                for first in range(0, len(rows), step):
                    some = {name: values[first : first + step] for name, values in block.items()}
                    file.write(framer.frame(some))
                    progress(len(rows[first : first + step]))
        ids = self._class_ids if shard.client is not None else None
        counts = None if ids is None else count_classes(ids[shard.rows])
        return file.info(shard.file, len(shard.rows), client=shard.client, class_counts=counts)
