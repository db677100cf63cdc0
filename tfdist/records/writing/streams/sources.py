"""Which sources are read once, record by record, and by what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdist.records.sources.recognise import called, recognise, refuse_batched
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.named_datasets import open_builder, open_dataset
from tfdist.records.writing.streams.stream import Stream, of_elements
from tfdist.records.writing.streams.tar_files import from_tar, is_tar


def open_stream(
    given: Any, asked: Asked, batched: bool | None = None, *, decode: bool = True
) -> Stream | None:
    """Returns the records of a source that is read once; None for one that is no stream.

    Args:
        given: a .tar file, see ``tar_files``, or anything but files and arrays that ``recognise``
            knows. Records are ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, where x and y may be
            dicts, or a dict {name: value}.
        asked: what the values of records that are dicts become; see ``read_raw``.
        batched: whether elements are batches; None finds out.
        decode: whether images are decoded where bad ones are left out, to see that they can be.

    Raises:
        DataError: no records, or elements of which only the user can say what they are.
        OptionError: something is asked that this source does not have.
    """
    source = called(recognise(given))
    kind = source.kind
    if kind == "dataset":
        from tfdist.records.writing.streams.datasets import from_tf_dataset

        return from_tf_dataset(source.given, asked, batched)
    if kind in ("dicts", "tuples"):
        total = len(source.given)
        stream = of_elements(kind, source.given, asked, batched=batched, total=total)
        if kind == "tuples":
            parts = "(x, y)" if len(source.given[0]) == 2 else "(x, y, sample_weight)"
            stream.notes.append(
                f"the tuples of the list are read as {parts}: make lists of them if they are "
                "numbers of one input"
            )
        return stream
    if kind == "sequence":
        batched = source.batched if batched is None else batched
        return of_elements(kind, source.read(), asked, batched=batched)
    if kind in ("iterator", "iterable"):
        return of_elements("generator", source.given, asked, batched=batched)
    if kind == "tfds":
        refuse_batched(batched, given)
        return open_builder(given, asked)
    if kind == "huggingface":
        refuse_batched(batched, given)
        return open_dataset(source.given, asked)
    if kind == "files" and is_tar(Path(given)):
        refuse_batched(batched, given)
        return from_tar(Path(given), asked, decode=decode)
    return None
