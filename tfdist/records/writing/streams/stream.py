"""Sources that are read once, record by record: their length is not known, and may be anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.exif import IMAGE_BEGINNINGS
from tfdist.records.sources.elements import (
    cannot_be_told,
    check_parts,
    kept,
    parts_of,
    told_by_shapes,
)
from tfdist.records.wording import EQUAL_ROWS, no_record
from tfdist.records.writing.roles import WEIGHT, Asked, Roles, assign, looks_like_label


class ImageFile(bytes):
    """The bytes of an image, whatever they begin with, and which file of an archive they are."""

    member: str


# Values by name, of as many records each: an array [records, ...] or a list.
Chunk = Mapping[str, "np.ndarray | list[Any]"]

_CHUNK_RECORDS = 256
_CHUNK_BYTES = 4 << 20
# Records that are looked at to see whether elements are batches.
_SEEN = 8


@dataclass(kw_only=True)
class Stream:
    """Records in the order in which they come, some at a time.

    Attributes:
        kind: what the source is, for the manifest.
        chunks: (split, records): the split that the records are of, None where there is none yet.
        structure: the names of the values of each record, and what they are.
        classes: of labels of class ids, the names of the classes.
        dtypes: of values that are given as Python's numbers, what they are to become.
        total: how many records they are, when that is known.
        splits: the splits that the source has; None when it has none.
        notes: see ``Columns.notes``.
        left_out: see ``Columns.left_out``; complete when all chunks have come.
    """

    kind: str
    chunks: Iterator[tuple[str | None, Chunk]]
    structure: Structure
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    total: int | None = None
    splits: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)


def of_elements(
    kind: str,
    elements: Iterable[Any],
    asked: Asked,
    *,
    batched: bool | None,
    total: int | None = None,
) -> Stream:
    """Returns the records of elements that Python gives one by one, each a record or a batch."""
    elements = map(kept, itertools.count(), elements)
    first = list(itertools.islice(elements, _SEEN))
    if not first:
        raise no_record("none", "a source")
    if batched is None:
        shapes = [list(map(_shape, _leaves(parts_of(element)))) for element in first]
        batched = told_by_shapes(shapes)
        if batched is not False:  # Records may differ in length, as batches do.
            raise cannot_be_told("the source", shapes[0])
    structure = Structure.of(first[0], asked, kind)
    parts = [(None, itertools.chain(first, elements))]
    return structure.stream(kind, parts, batched=batched, total=total)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What the parts of an element are called, and what they are.

    Attributes:
        is_flat: whether an element is a dict {name: value}; else it is x, (x, y) or (x, y, weight).
        client: the value that names the client of each record.
        keys: of x and y, the keys when they are dicts.
        roles: see ``Columns.roles``.
    """

    is_flat: bool
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    weights: tuple[str, ...]
    client: str | None
    keys: tuple[tuple[str, ...] | None, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        of_client = () if self.client in (None, *self.labels, *self.inputs) else (self.client,)
        return (*self.inputs, *self.labels, *self.weights, *of_client)

    @classmethod
    def of(cls, element: Any, asked: Asked, place: str) -> Structure:
        """Returns that of a first element. Raises DataError for one that is no record."""
        if isinstance(element, Mapping):
            if not all(isinstance(name, str) for name in element):
                raise DataError(
                    "the values of a record that is a dict must have names of text",
                    received=f"the names {', '.join(map(repr, element))}",
                    mend="Name them, as in {'x': value, 'y': label}",
                )
            roles = roles_of(f"the {place}", list(element), asked)
            return cls(
                is_flat=True,
                inputs=roles.inputs,
                labels=roles.labels,
                weights=() if roles.weight is None else (roles.weight,),
                client=asked.client,
                roles=roles.listed(list(element)),
            )
        if asked.names_columns:
            raise DataError(
                "the options label, inputs and drop must go with records that are dicts",
                received=f"one of them with records that are a {type(element).__name__}",
                mend="Leave it out, or give each record as a dict {name: value}",
            )
        parts = parts_of(element)
        check_parts("a record", parts)
        keys = tuple(tuple(part) if isinstance(part, Mapping) else None for part in parts)
        _, y, weight = (*parts, None, None)[:3]
        inputs = keys[0] or ("x",)
        labels = () if y is None else keys[1] or ("label",)
        weights = () if weight is None else (WEIGHT,)
        names = (*inputs, *labels, *weights)
        if len(set(names)) < len(names):
            raise DataError(
                "each value of a record must have a name of its own",
                received=", ".join(map(str, names)),
                mend=f"Rename one; what is no dict is called 'x', 'label' or '{WEIGHT}'",
            )
        if asked.client in inputs and len(inputs) > 1:
            inputs = tuple(name for name in inputs if name != asked.client)
        return cls(
            is_flat=False,
            inputs=inputs,
            labels=labels,
            weights=weights,
            client=asked.client,
            keys=keys,
        )

    def stream(
        self,
        kind: str,
        parts: Iterable[tuple[str | None, Iterable[Any]]],
        *,
        batched: bool = False,
        **known: Any,
    ) -> Stream:
        """Returns the stream of such elements.

        Args:
            parts: (split, elements) of each split; None where they are of none yet.
            batched: whether an element is a batch of records.
            known: the other attributes of the stream.
        """
        notes = known.setdefault("notes", [])
        chunks = self._chunks(parts, batched, notes)
        return Stream(kind=kind, chunks=chunks, structure=self, **known)

    def _chunks(
        self,
        parts: Iterable[tuple[str | None, Iterable[Any]]],
        batched: bool,
        notes: list[str],
    ) -> Iterator[tuple[str | None, Chunk]]:
        numbers = itertools.count()
        known = {*self.names, *(name for name, _ in self.roles)}

        def named(element: Any) -> dict[str, Any]:
            number = next(numbers)
            values = self.named(number, element)
            for part in (element,) if self.is_flat else parts_of(element):
                for name in part.keys() - known if isinstance(part, Mapping) else ():
                    known.add(name)
                    notes.append(f"'{name}' is left out: record {number} has it, the first has not")
            return values

        for split, elements in parts:
            for chunk in (
                _checked_batches(map(named, elements))
                if batched
                else _in_chunks(map(named, elements), self.names)
            ):
                yield split, chunk

    def named(self, number: int, element: Any) -> dict[str, Any]:
        """Returns the values of an element by name."""
        if self.is_flat:
            if not isinstance(element, Mapping):
                raise _unlike(number, "a dict", type(element).__name__)
            return self._pick(number, element)
        parts = parts_of(element)
        if len(parts) != len(self.keys):
            raise _unlike(number, f"{len(self.keys)} parts", str(len(parts)))
        values: dict[str, Any] = {}
        for part, keys, name in zip(parts, self.keys, ("x", "label", WEIGHT), strict=False):
            if keys is not None and not isinstance(part, Mapping):
                raise _unlike(number, "a dict", type(part).__name__)
            if part is not None:
                values.update(part if keys is not None else {name: part})
        return self._pick(number, values)

    def _pick(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {name: values[name] for name in self.names}
        except KeyError as error:
            place = getattr(values, "place", None)
            found = ", ".join(map(str, values)) + (f" in {place}" if place else "")
            raise _unlike(number, f"the value {error}", found) from None


def roles_of(place: str, names: list[str], asked: Asked) -> Roles:
    """Returns what the values of records that are dicts become; without a label, all are inputs."""
    if not (asked.names_columns or any(looks_like_label(name) for name in names)):
        client = asked.client
        if client is None or client in names:
            left = [name for name in names if name not in (client, WEIGHT)]
            weight = WEIGHT if WEIGHT in names else None
            return Roles(inputs=tuple(left), labels=(), weight=weight, client=client, dropped=())
    return assign(place, "value", names, asked)


def image_like(value: Any) -> bool:
    """Whether a value is the bytes of a JPEG or PNG file, or an image of Pillow's."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return isinstance(value, ImageFile) or bytes(value[:8]).startswith(IMAGE_BEGINNINGS)
    return hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "getbands")


def _in_chunks(records: Iterator[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Chunk]:
    """Yields the values of records together, some at a time."""
    chunk: dict[str, list[Any]] = {name: [] for name in names}
    size = length = 0
    for record in records:
        for name in names:
            value = _plain(record[name])
            chunk[name].append(value)
            size += _size(value)
        length += 1
        if length == _CHUNK_RECORDS or size > _CHUNK_BYTES:
            yield chunk
            chunk, size, length = {name: [] for name in names}, 0, 0
    if length:
        yield chunk


def chunk_bytes(chunk: Chunk) -> int:
    """Returns about how many bytes the values of a chunk have."""
    return sum(
        values.nbytes if isinstance(values, np.ndarray) else sum(map(_size, values))
        for values in chunk.values()
    )


def _checked_batches(batches: Iterator[Mapping[str, Any]]) -> Iterator[Chunk]:
    for number, batch in enumerate(batches):
        values = {
            name: value if isinstance(value, list) else np.asarray(value)
            for name, value in batch.items()
        }
        lengths = [
            len(value) if isinstance(value, list) or value.ndim else None
            for value in values.values()
        ]
        if len(set(lengths)) > 1 or None in lengths:
            said = ("a number alone" if length is None else str(length) for length in lengths)
            raise DataError(
                "the parts of a batch must have the same number of rows",
                received=", ".join(said) + f" in batch {number}",
                mend=EQUAL_ROWS,
            )
        if lengths[0]:
            yield values


def _unlike(number: int, expected: str, received: str) -> DataError:
    return DataError(
        f"every record must have {expected}, as the first has",
        received=f"{received} in record {number}",
        mend="Make all records alike",
    )


def _leaves(element: Any) -> Iterator[Any]:
    if isinstance(element, Mapping):
        for value in element.values():
            yield from _leaves(value)
    elif isinstance(element, tuple):
        for value in element:
            if value is not None:
                yield from _leaves(value)
    else:
        yield element


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, bytearray)) or image_like(value):
        return ()
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list) else ()


def _plain(value: Any) -> Any:
    """Returns what NumPy holds of a tensor; anything else as it is."""
    if isinstance(value, (np.ndarray, np.generic, str, bytes, int, float, list)):
        return value
    is_tensor = hasattr(value, "__array__") and not image_like(value)
    return np.asarray(value)[()] if is_tensor else value  # Text itself, where it is a scalar.


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    if image_like(value):
        return value.width * value.height * 4
    return 8
