"""The features of a stream: found in its first records, and demanded of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.clients.partition import take_column
from tfdist.records.format.columns import Column, Columns, check_lengths, column_of
from tfdist.records.format.encoding import Block, varint_width
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.format.text_and_ragged import (
    RaggedColumn,
    TextColumn,
    as_label,
    objects,
)
from tfdist.records.format.whole_numbers import check_kept
from tfdist.records.wording import placed
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.streams.stream import Chunk, Stream, image_like

if TYPE_CHECKING:
    from tfdist.records.writing.streams.images import StreamImages

# A label or a count that is larger than any of the first is no surprise: up to four times as much.
_ROOM = 4
_LEAST_WIDTH = 2


class StreamFeatures:
    """What the records of a stream are, judged by the first of them.

    Args:
        head: those, some at a time.
        images: what is said of those among the values.
    """

    def __init__(self, stream: Stream, head: Sequence[Chunk], images: ImageOptions):
        self._stream = stream
        self._values: dict[str, _Values | StreamImages] = {}
        self._columns: dict[str, Column] = {}
        of = stream.structure
        for role, names in (("input", of.inputs), ("label", of.labels), ("weight", of.weights)):
            for name in names:
                self._values[name], self._columns[name] = _found(stream, head, name, role, images)
        check_lengths({name: len(column) for name, column in self._columns.items()})
        self._head = head

    def schema(self) -> Schema:
        return Schema(tuple(values.feature() for values in self._values.values()))

    def notes(self) -> list[str]:
        return [note for values in self._values.values() for note in values.notes()]

    def columns(self) -> Columns:
        """Returns the first records, which are all when the stream has no more."""
        structure = self._stream.structure
        owners, client = None, structure.client
        if client is not None:
            others: dict[str, Any] = dict.fromkeys(structure.inputs)
            labels: dict[str, Any] = dict.fromkeys(structure.labels)
            if client in self._head[0]:
                values = _joined(client, [chunk[client] for chunk in self._head])
                (labels if client in labels else others)[client] = values
            owners, _ = take_column(client, others, labels)
        return Columns(
            self._stream.kind,
            self.schema(),
            self._columns,
            owners=owners,
            roles=structure.roles,
            notes=[*self._stream.notes, *self.notes()],
            left_out=dict(self._stream.left_out),
        )

    def widths(self) -> dict[str, int]:
        """Returns bytes for each varint that those of later records will fit into as well."""
        widths = {}
        for feature in self.schema().features:
            if feature.encoding == "int64" and not feature.varies:
                largest = np.array([self._columns[feature.name].min(), 0], np.int64)
                largest[1] = min(int(self._columns[feature.name].max()), 1 << 60) * _ROOM
                widths[feature.name] = max(_LEAST_WIDTH, varint_width(largest))
        return widths

    def forget_head(self) -> None:
        """Lets go of the first records, which are then taken like all others."""
        self._head, self._columns = [], {}

    def block(self, chunk: Chunk, first: int) -> Block:
        """Returns the records of a chunk as a framer takes them.

        Args:
            first: number of the first of them, for messages.

        Raises:
            DataError: a record is not as the first ones are.
        """
        block = {}
        for name, values in self._values.items():
            try:
                block[name] = values.take(chunk[name], first)
            except _InChunkError as error:
                raise placed(error.args[0], lambda n: f"record {n + first}") from None
        return block


class _InChunkError(Exception):
    """A DataError that counts records from the start of a chunk."""


def _found(
    stream: Stream, head: Sequence[Chunk], name: str, role: str, options: ImageOptions
) -> tuple[_Values | StreamImages, Column]:
    """Returns what takes the values of a name, and those of the first records as a column."""
    if image_like(head[0][name][0]):
        from tfdist.records.writing.streams.images import StreamImages

        images = StreamImages(name, role, options)
        files = [value for chunk in head for value in chunk[name]]
        return images, objects(images.take(files, 0))
    values = _joined(name, [chunk[name] for chunk in head])
    classes, cast = stream.classes.get(name), stream.dtypes.get(name)
    if cast is not None:
        values = _cast(values, cast)
    notes: list[str] = []
    feature, column = column_of(name, role, values, classes, notes)
    if isinstance(column, RaggedColumn):
        return _Ragged(feature, None, cast, notes), column
    if isinstance(column, TextColumn):
        return _Text(feature, None, None, notes), column
    if feature.classes is not None and classes is None:
        return _TextLabels(feature), column
    return _Dense(feature, np.asarray(values).dtype, cast, notes), column


class _Values:
    """The values of one feature as they come.

    Args:
        feature: as the first values are.
        dtype: of those, where they are numbers of one shape.
        cast: what Python's numbers are to become.
        notes: what is to be told of the values.
    """

    def __init__(
        self, feature: Feature, dtype: np.dtype | None, cast: str | None, notes: list[str]
    ):
        self._feature, self._dtype, self._cast, self._notes = feature, dtype, cast, notes

    def feature(self) -> Feature:
        return self._feature

    def notes(self) -> list[str]:
        return self._notes

    def take(self, values: Any, first: int) -> Any:
        """Returns what a framer takes of the values of some records, the first of this number."""
        raise NotImplementedError

    def _column(self, values: Any) -> Any:
        feature = self._feature
        try:
            return column_of(feature.name, feature.role, values, feature.classes, self._notes)[1]
        except DataError as error:
            raise _InChunkError(error) from None

    def _part(self, value: Any, record: int) -> np.ndarray:
        """Returns what a record has, text as objects, numbers in the dtype of the first ones."""
        feature, shape = self._feature, self._feature.shape
        is_text = feature.dtype == "string"
        wanted = np.dtype(object if is_text else feature.dtype)
        try:
            if wanted.kind == "b" and _has_none(value):  # Which would become False.
                raise TypeError("a missing value")
            part = np.asarray(value, wanted if is_text else self._cast)
        except (ValueError, TypeError):  # Rows of unequal lengths, or a missing value.
            part = np.empty(())
        if feature.is_ragged and part.ndim:
            if not len(part):
                return np.empty((0, *shape[1:]), wanted)
            shape = (len(part), *shape[1:])
        # A label becomes float32 with those of all records.
        is_label = feature.role == "label" and part.dtype == np.float64 and wanted.kind == "f"
        if is_text:
            fits = all(isinstance(text, (str, bytes)) for text in part.flat)
        else:
            fits = is_label or np.can_cast(part.dtype, wanted, "safe")
        if part.shape != shape or not fits:
            dtype = "text" if is_text else wanted
            raise _odd_one(feature.name, [value], feature.shape, dtype, record)
        if wanted.kind == "f":
            check_kept(feature.name, value, part.astype(np.float64), record)
        return part if is_label else part.astype(wanted, copy=False)


class _Dense(_Values):
    """Numbers of one shape and dtype."""

    def take(self, values: Any, first: int) -> np.ndarray:
        feature, dtype = self._feature, self._dtype
        if self._cast is not None:
            values = _cast(values, self._cast)
        try:
            array = _stacked(feature.name, values)
            if array is not None and array.dtype.kind in "iu" and dtype.kind == "f":
                check_kept(feature.name, array, array.astype(dtype))
        except DataError as error:
            raise _InChunkError(error) from None
        is_alike = array is not None and array.shape[1:] == feature.shape
        if not is_alike or not np.can_cast(array.dtype, dtype, "safe"):
            raise _odd_one(feature.name, values, feature.shape, dtype, first)
        return self._column(array.astype(dtype, copy=False))


class _Ragged(_Values):
    """Arrays whose first length differs from record to record."""

    _longest = 1

    def feature(self) -> Feature:
        return replace(self._feature, longest=max(self._longest, self._feature.longest or 1))

    def take(self, values: Any, first: int) -> list[Any]:
        parts = [self._part(value, first + number) for number, value in enumerate(values)]
        if not any(map(len, parts)):
            return parts
        column = self._column(objects(parts))
        self._longest = max(self._longest, column.longest)
        return column[np.arange(len(column))]


class _Text(_Values):
    """Text, a string or as many strings in each record."""

    def take(self, values: Any, first: int) -> list[Any]:
        parts = [self._part(value, first + number) for number, value in enumerate(values)]
        return self._column(np.stack(parts))[np.arange(len(parts))]


class _TextLabels(_Values):
    """Labels of text: their classes are numbered as they come, those of the first ones by name."""

    def __init__(self, feature: Feature):
        super().__init__(feature, None, None, [])
        self._ids = {name: number for number, name in enumerate(feature.classes)}

    def feature(self) -> Feature:
        return replace(self._feature, classes=tuple(self._ids))

    def take(self, values: Any, first: int) -> np.ndarray:
        ids = np.empty(len(values), np.int64)
        for number, value in enumerate(values):
            if not isinstance(value, (str, bytes)):
                raise _odd_one(self._feature.name, [value], (), "text", first + number)
            text = as_label(self._feature.name, value)
            ids[number] = self._ids.setdefault(text, len(self._ids))
        return ids


def _odd_one(name: str, values: Any, shape: Any, dtype: Any, first: int) -> DataError:
    """Returns the error for the first value that is not as those before it."""
    said = f"shape {list(shape)} of {dtype}".replace("None", "n")
    received = f"values of another kind from record {first} on"
    for number, value in enumerate(values):
        try:
            item = np.asarray(value)
        except ValueError:
            received = f"rows of unequal lengths in record {first + number}"
            break
        ragged = tuple(shape)[:1] == (None,)
        is_alike = item.shape[1:] == shape[1:] if ragged and item.ndim else item.shape == shape
        is_number = isinstance(dtype, np.dtype)
        if not is_alike or (is_number and not np.can_cast(item.dtype, dtype, "safe")):
            kind = "text" if item.dtype.kind in "SU" else item.dtype
            received = f"shape {list(item.shape)} of {kind} in record {first + number}"
            break
    return DataError(
        f"'{name}' of every record must be as in the first ones, {said}",
        received=received,
        mend="Make all records alike, or give one of the others among the first 128 MB",
    )


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """Returns the values of all parts: one array where they are arrays alike, else a list."""
    arrays = all(isinstance(part, np.ndarray) for part in parts)
    if arrays and len({(part.shape[1:], part.dtype) for part in parts}) == 1:
        return np.concatenate(parts)
    values = [value for part in parts for value in part]
    array = _stacked(name, values)
    return values if array is None else array


def _stacked(name: str, values: Any) -> np.ndarray | None:
    """Returns the array of values that have one shape; None for others, and for text.

    Raises:
        DataError: whole numbers that have become others as floats.
    """
    if isinstance(values, np.ndarray):
        return values
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.dtype.kind in "OSU":  # Text as NumPy's would lose the NULs that one ends with.
        return None
    check_kept(name, values, array)
    return array


def _cast(values: Any, dtype: str) -> Any:
    """Returns Python's numbers in the dtype that their source has for them."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    if dtype == "bool" and _has_none(values):  # Which would become False.
        return values
    try:
        return np.asarray(values, dtype)
    except (ValueError, TypeError):
        # What is missing is told by whoever makes a column of them.
        return values if _has_none(values) else [np.asarray(value, dtype) for value in values]


def _has_none(value: Any) -> bool:
    """Whether a value is missing, at any depth."""
    return value is None or (isinstance(value, (list, tuple)) and any(map(_has_none, value)))
