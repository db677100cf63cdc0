"""Writing a folder of TFRecord shards: all of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.clients.partition import Partition, check_num_clients, parse_partition
from tfdist.records.format.columns import Columns
from tfdist.records.format.manifest import Manifest
from tfdist.records.format.readings import with_readings
from tfdist.records.format.schema import Schema
from tfdist.records.format.splits import DEFAULT_SPLIT, parse_split
from tfdist.records.parts import Part
from tfdist.records.writing.column_shards import write_columns
from tfdist.records.writing.images.options import ImageOptions, image_options
from tfdist.records.writing.options import WriteOptions, cores
from tfdist.records.writing.places import check_apart, check_free, check_kept, on_this_machine
from tfdist.records.writing.raw_sources import check_no_table, read_raw
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.same_run import check_same, known_by, said_in
from tfdist.records.writing.shard_files import Progress, said_of, stop_on_sigterm
from tfdist.records.writing.shard_folders import find_shards, write_shards_anew
from tfdist.records.writing.shard_parts import check_own, read_note
from tfdist.records.writing.streams.sources import open_stream
from tfdist.records.writing.streams.stream import Stream
from tfdist.records.writing.streams.tar_files import is_tar
from tfdist.records.writing.streams.writer import (
    HEAD_BYTES,
    Head,
    SourceFailedError,
    read_head,
    write_stream,
)
from tfdist.records.writing.unfinished import Unfinished


def write(
    source: Any,
    out: str | Path,
    *,
    num_shards: int | None = None,
    split: str | Mapping[str, float] | None = None,
    stratify: bool = False,
    seed: int = 0,
    compression: str = "none",
    workers: int | None = None,
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
    resume: bool = False,
    overwrite: bool = False,
    part: str | None = None,
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
        workers: number of threads that look at images, which are decoded outside Python's lock,
            and write them; of all else number of processes, which are forked; threads where
            TensorFlow has been imported, which cannot be forked. What is written is the same
            whatever it is. Streams and shards are written by one. None: one for each core where
            records hold files of images, else 1.
        label: the label's column of a table, or its array in a .npz; or several, as a list or
            separated by commas.
        inputs: the inputs, likewise; what is neither is left out. None: all that is not a label.
        drop: what to leave out, likewise.
        weight: the sample weight; None: "sample_weight", where there is one.
        text: columns of a table, or of ``labels``, that are text, whatever they look like.
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
        labels: of a folder of images, a table in a file with a row for each, or COCO's
            annotations; see ``images.folders``. It may be a URL too.
        masks: likewise, a folder of masks, which are called as their images are.
        skip_bad: whether rows, texts and images that cannot be read, and images that lack a row or
            a mask, are left out, which is told.
        resume: whether to go on with what a run that was ended has kept in ``out``.unfinished, of
            the same source with the same options. Of streams that do not fit into memory, and of
            shards, nothing is kept: they begin anew.
        overwrite: whether to remove that, and begin anew. What is finished is never replaced, but
            a part is.
        part: "2/8" writes the second of eight parts of the shards alone, into a folder beside
            ``out``, "NAME.part-2-of-8"; see ``shard_parts.merge``. With ``resume`` it begins where
            there is nothing to go on with, and is left as it is where it is whole. Not of streams
            that do not fit into memory, nor of shards.
        progress: called with (records written, records in all) now and then, from any thread; of a
            stream whose length is not known with None for all.
        opened: called with the columns of the source before anything is written. None: what is to
            be told of the source, as what was left out, is printed.

    Returns:
        The manifest that was written; of a part with its shards alone, though nowhere as a file.

    Raises:
        OptionError: an option that cannot hold.
        DataError: a source that cannot be written, a folder that is not empty, or no files' shards
            to go on with. ``out`` is never there before it is complete. What was written before
            Ctrl-C, SIGTERM, a kill or a full disk stays in ``out``.unfinished for ``resume``, but
            for streams, shards and URLs to write to, of which nothing is left.
        InUseError: another process is writing the folder.
    """
    # All that decides what is written: who goes on must ask for the same.
    said = said_in(locals())

    def as_read(schema: Schema) -> Schema:
        read_in = {} if write_resized else {"resize": resize, "fit": fit}
        return with_readings(schema, **read_in, color=color).checked()

    chosen = None if part is None else Part.of(part)
    dealt = _check_clients(clients, partition, num_shards)
    options = WriteOptions(
        shares=None if split is None else parse_split(split),
        num_shards=num_shards,
        stratify=stratify,
        seed=seed,
        compression=compression,
        workers=workers,
        clients=clients,
        partition=dealt,
        progress=progress,
        opened=opened,
        as_read=as_read,
        part=chosen,
    )
    if resume and overwrite:
        raise OptionError("resume and overwrite must not go together", mend="Leave one out")
    is_kept = check_kept(out, is_asked=resume or overwrite or chosen is not None)
    asked = Asked(
        label=label,
        inputs=inputs,
        drop=drop,
        weight=weight,
        client=None if dealt is None else dealt.column,
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
        skip_bad=skip_bad,
        decode=decode,
        workers=cores() if workers is None else workers,
    )
    with on_this_machine(source, out, {"labels": labels, "masks": masks}) as (here, folder, beside):
        images = replace(images, **beside)
        of_all = folder.resolve()
        check_free(of_all, here, overwrite=overwrite)
        folder = of_all if chosen is None else chosen.path_of(of_all)
        with said_of(folder):
            whole = None if chosen is None else read_note(folder)
        if whole is None:
            check_free(folder, here, overwrite=overwrite)
        elif not (resume or overwrite):
            raise DataError(
                "a part that is whole must be kept or given up",
                received=folder,
                mend=f"Keep it with {spelt('resume', True)}, or write it again with "
                + spelt("overwrite", True),
            )
        shards = find_shards(here)
        if shards is not None:
            check_apart(folder, shards.folder)
        is_read_once = shards is not None or _is_read_once(here)
        # Also where nothing will be kept: what another run has left there is told.
        with said_of(folder):
            run = Unfinished(
                of_all,
                *known_by(source, here, {labels: beside["labels"], masks: beside["masks"]}),
                said,
                resume=resume,
                overwrite=overwrite,
                may_begin=chosen is not None or is_read_once,
                part=chosen,
            )
        if resume and is_read_once and not run.is_resumed:
            run.notes.append("nothing was kept of an earlier run: this one began anew")
        with stop_on_sigterm(), run.kept_if_ended():
            if whole is not None:
                if resume:
                    check_same(run.now, whole.run)
                    if isinstance(here, (str, os.PathLike)) and whole.is_in(folder):
                        if run.is_resumed:  # Ended behind its last step.
                            run.remove()
                        options.tell(whole.columns(folder))
                        return whole.manifest_of()
                    # Of what lies in memory nothing but the plan says whether it is the same.
                    run.now.setdefault("plan", whole.run["plan"])
                check_own(folder, whole)
                run.replaces = True
            if shards is None:
                kept = run if is_kept else None
                return _write_records(here, folder, options, asked, images, batched, kept)
            images.check_unused(here)
            check_no_table(here, asked)
            of_records = {
                "label, inputs and drop": asked.names_columns,
                "batched": batched is not None,
            }
            _refuse(
                {**options.needing_all_records(), **of_records},
                needs="data from which records are made",
                received="a folder of shards, whose records stay as they are",
                mend="Leave it out, or write the shards from their source",
            )
            options.tell(shards.columns(run.notes))
            with said_of(folder):
                return write_shards_anew(shards, folder, options)


def _refuse(asked: Mapping[str, bool], *, needs: str, received: str, mend: str) -> None:
    """Raises OptionError for the first that is asked for, by name, and that goes with others."""
    for name, is_asked in asked.items():
        if is_asked:
            raise OptionError(f"{name} must go with {needs}", received=received, mend=mend)


def _is_read_once(source: Any) -> bool:
    """Whether a run that writes it may have kept nothing, however it was ended."""
    return not isinstance(source, (str, os.PathLike)) or is_tar(Path(source))


def _write_records(
    source: Any,
    out: Path,
    options: WriteOptions,
    asked: Asked,
    images: ImageOptions,
    batched: bool | None,
    run: Unfinished | None,
) -> Manifest:
    """Writes what is no folder of shards."""
    stream = open_stream(source, asked, batched, decode=images.decode)
    if stream is None:
        if run is not None:
            images = replace(images, looked_at=run.looked_at)
        columns = read_raw(source, asked, images=images, batched=batched)
        return write_columns(columns, out, options, run)
    (replace(images, skip_bad=False) if stream.kind == "tar" else images).check_unused(source)
    check_no_table(source, asked)
    head = read_head(stream, images)
    if head.is_whole:
        return write_columns(head.columns().owned_by(asked.client), out, options, run)
    if run is not None and run.is_resumed:
        raise DataError(
            f"{spelt('resume', True)} must find the records that the run which was ended found",
            received=f"a stream of more than {HEAD_BYTES >> 20} MB, of which nothing is kept",
            mend=f"Begin anew with {spelt('overwrite', True)}",
        )
    stream.notes += run.notes if run is not None else []
    return _write_stream(stream, head, out, options)


def _write_stream(stream: Stream, head: Head, out: Path, options: WriteOptions) -> Manifest:
    """Writes a stream of more records than are held in memory."""
    _refuse(
        options.needing_all_records(),
        needs="a source whose records are all known",
        received=f"a stream of more than {HEAD_BYTES >> 20} MB, which is read once",
        mend="Give it as arrays or as a folder, or write the stream without, and then arrays of "
        "what you need",
    )
    shares = options.shares
    # A split that is asked for divides anew what is divided.
    keeps_splits = stream.splits is not None and shares is None
    if keeps_splits:
        shares = dict.fromkeys(stream.splits, 1.0)
    shares = parse_split(DEFAULT_SPLIT) if shares is None else shares
    if options.opened is not None:
        # What is found while it is written is added to these notes.
        options.opened(replace(head.features.columns(), notes=stream.notes))
    try:
        with said_of(out):
            manifest = write_stream(
                stream, head, out, replace(options, shares=shares), keeps_splits=keeps_splits
            )
    except SourceFailedError as error:
        raise error.__cause__ from None
    options.tell_notes(stream.notes)
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
