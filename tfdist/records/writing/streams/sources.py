"""Which sources are read once, record by record, and by what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams import hugging_face, tfds_builder
from tfdist.records.writing.streams.stream import Stream, of_elements
from tfdist.records.writing.streams.tar_files import from_tar, is_tar

_KERAS = ("keras", "tf_keras", "tensorflow")


def open_stream(
    source: Any, asked: Asked, batched: bool | None = None, *, decode: bool = True
) -> Stream | None:
    """Returns the records of a source that is read once; None for one that is no stream.

    Args:
        source: a .tar file, see ``tar_files``; a tf.data.Dataset; a generator, or a function
            without arguments that returns one or another iterable; a list of dicts, or of tuples
            of two or three, or another iterable that is neither an array nor lists of numbers; a
            keras.utils.Sequence; a ``datasets.Dataset``, ``IterableDataset`` or dict of them by
            split; a builder of TensorFlow Datasets. Records are ``x``, ``(x, y)`` or
            ``(x, y, sample_weight)``, where x and y may be dicts, or a dict {name: value}.
        asked: what the values of records that are dicts become; see ``read_raw``.
        batched: whether elements are batches; None finds out.
        decode: whether images are decoded where bad ones are left out, to see that they can be.

    Raises:
        DataError: no records, or elements of which only the user can say what they are.
        OptionError: something is asked that this source does not have.
    """
    if isinstance(source, (str, Path)):
        if not is_tar(Path(source)):
            return None
        _refuse_batched(batched, source)
        return from_tar(Path(source), asked, decode=decode)
    if _is_tf_dataset(source):
        from tfdist.records.writing.streams.datasets import from_tf_dataset

        return from_tf_dataset(source, asked, batched)
    if tfds_builder.is_builder(source):
        _refuse_batched(batched, source)
        return tfds_builder.open_builder(source, asked)
    if hugging_face.is_dataset(source):
        _refuse_batched(batched, source)
        return hugging_face.open_dataset(source, asked)
    if _is_sequence(source):
        elements = (source[number] for number in range(len(source)))
        return of_elements("sequence", elements, asked, batched=True)
    if _is_function(source):
        made = source()
        if _is_function(made) or not isinstance(made, Iterable):
            raise DataError(
                "a function that gives records must return a generator, or another iterable",
                received=f"a {type(made).__name__}",
            )
        stream = open_stream(made, asked, batched)
        return stream or of_elements("generator", iter(made), asked, batched=batched)
    if isinstance(source, Iterator):
        return of_elements("generator", source, asked, batched=batched)
    if isinstance(source, list) and source and isinstance(source[0], Mapping):
        return of_elements("dicts", iter(source), asked, batched=batched, total=len(source))
    if _are_tuples(source):
        return _of_tuples(source, asked, batched)
    plain = (str, bytes, tuple, list, set, frozenset, Mapping)
    is_array = hasattr(source, "shape") or hasattr(source, "__array__")
    if isinstance(source, plain) or is_array or not hasattr(source, "__iter__"):
        return None
    return of_elements("generator", iter(source), asked, batched=batched)


def _are_tuples(source: Any) -> bool:
    """Whether it is a list of (x, y) or (x, y, sample_weight), as a generator gives records."""
    if not isinstance(source, list) or not all(type(record) is tuple for record in source):
        return False
    return {len(record) for record in source} in ({2}, {3})


def _of_tuples(source: list[tuple[Any, ...]], asked: Asked, batched: bool | None) -> Stream:
    stream = of_elements("tuples", iter(source), asked, batched=batched, total=len(source))
    parts = "(x, y)" if len(source[0]) == 2 else "(x, y, sample_weight)"
    stream.notes.append(
        f"the tuples of the list are read as {parts}: make lists of them if they are numbers of "
        "one input"
    )
    return stream


def _is_tf_dataset(source: Any) -> bool:
    # A dataset can only come from a program that has imported TensorFlow already.
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(source, tf.data.Dataset)


def _is_sequence(source: Any) -> bool:
    """Whether it is a keras.utils.Sequence or PyDataset, of any Keras."""
    return any(
        base.__name__ in ("Sequence", "PyDataset") and base.__module__.startswith(_KERAS)
        for base in type(source).__mro__
    )


def _is_function(source: Any) -> bool:
    return (
        isinstance(source, Callable)
        and not isinstance(source, type)
        and not hasattr(source, "shape")
    )


def _refuse_batched(batched: bool | None, source: Any) -> None:
    if batched is not None:
        raise OptionError(
            "batched must be said of a tf.data.Dataset or a generator alone",
            received=f"batched={batched} beside a {type(source).__name__}",
            mend="Leave it out",
        )
