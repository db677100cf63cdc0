"""From what a request holds to serialised records, as the shards of the training had them.

Knows nothing of HTTP, and needs no TensorFlow.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.records.format.encoding import example_of
from tfdist.records.format.schema import STRING, Feature, Schema
from tfdist.records.writing.as_trained import columns_in, is_date, of_table
from tfdist.records.writing.tables.dates import dates_of, year_first
from tfdist.records.writing.tables.table import Table, Values

#: The key of TensorFlow Serving for bytes, which JSON has no type for.
B64 = "b64"
# What a photo may be: Pillow reads many more formats, some by other programs.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")

# Whole numbers beyond are no float64, and are rounded otherwise from it to float32.
_MOST_EXACT = 2**53


class InstanceError(Exception):
    """An instance that is not what the model takes. The message is one line, for its sender."""


@dataclass(frozen=True)
class Limits:
    """What one request may hold.

    Attributes:
        instances: most instances.
        pixels: most pixels of a photo, before it is resized.
        all_pixels: of all photos together.
    """

    instances: int = 1024
    pixels: int = 50_000_000
    all_pixels: int = 500_000_000


class _Pixels:
    """Those of a request so far. Raises InstanceError when there are too many."""

    def __init__(self, limits: Limits):
        self._limits, self._all = limits, 0

    def add(self, count: int) -> None:
        self._all += count
        if count > self._limits.pixels:
            raise InstanceError(f"a photo must have at most {self._limits.pixels} pixels")
        if self._all > self._limits.all_pixels:
            most = self._limits.all_pixels
            raise InstanceError(f"the photos of a request must have at most {most} pixels")


def as_asked(inputs: Sequence[Feature], *, is_adopted: bool = False) -> Schema:
    """Returns the inputs of a training as requests hold them: images of any size and format.

    Args:
        is_adopted: whether others wrote the records: what these leave as it was held, stays so.
    """
    return Schema(tuple(_as_asked(feature, is_adopted) for feature in inputs))


def _as_asked(feature: Feature, is_adopted: bool) -> Feature:
    reading = feature.reading
    if feature.is_image:
        height, width, channels = feature.read_shape
        upright = reading.upright or not is_adopted
        size = None if height is None or width is None else (height, width)
        reading = replace(reading, size=size, upright=upright)
        shape = (None, None, channels)
        return replace(feature, shape=shape, encoding="image", reading=reading)
    if feature.is_ragged:
        reading = replace(reading, length=feature.read_shape[0])
    return replace(feature, reading=reading, in_list=False)


def records_of(schema: Schema, instances: Sequence[Any], limits: Limits) -> list[bytes]:
    """Returns the Example of each instance.

    An instance is the value of the only input, or an object with each input by its name; of a
    training on a table also an object with its columns, as a row of the table has them. Either way
    categories of a table are their names, and dates may be text.

    Args:
        schema: see ``as_asked``.

    Raises:
        InstanceError: one is not what the schema says, or there are none, or too many.
    """
    if not 0 < len(instances) <= limits.instances:
        raise InstanceError(
            f"a request must have 1 to {limits.instances} instances, but has {len(instances)}"
        )
    if _are_rows(schema, instances):
        return _of_plain_rows(schema, instances) or _of_rows(schema, instances)
    records, pixels = [], _Pixels(limits)
    for number, instance in enumerate(instances):
        try:
            records.append(example_of(_values(schema, instance, pixels)))
        except InstanceError as error:
            raise InstanceError(f"instance {number}: {error}") from None
    return records


def _are_rows(schema: Schema, instances: Sequence[Any]) -> bool:
    names = {feature.name for feature in schema.features}
    first = instances[0]
    is_other = isinstance(first, Mapping) and set(first) != names and B64 not in first
    return is_other and all(map(columns_in, schema.features))


def _of_plain_rows(schema: Schema, rows: Sequence[Any]) -> list[bytes] | None:
    """Returns what ``_of_rows`` does of rows of numbers and categories alone; None of others.

    To look at a table takes ten times as long as a small model.
    """
    records = []
    for row in rows:
        if not isinstance(row, Mapping):
            return None
        values = {feature: _plain(feature, row) for feature in schema.features}
        if any(value is None for value in values.values()):
            return None
        records.append(example_of(values))
    return records


def _plain(feature: Feature, row: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the value of a feature where its columns hold what needs no second look."""
    values = [row.get(name) for name in columns_in(feature)]
    if feature.classes is not None:
        (name,) = values
        is_known = type(name) is str and name in feature.classes
        return np.asarray(feature.classes.index(name)) if is_known else None
    are_numbers = all(
        type(value) is float or (type(value) is int and abs(value) <= _MOST_EXACT)
        for value in values
    )
    if feature.dtype != "float32" or feature.shape != (len(values),) or not are_numbers:
        return None
    numbers = np.array(values, np.float64)
    # Not so of what is no number, either.
    is_within = (np.abs(numbers) <= np.finfo(np.float32).max).all()
    return numbers.astype(np.float32) if is_within else None


def _of_rows(schema: Schema, rows: Sequence[Any]) -> list[bytes]:
    if not all(isinstance(row, Mapping) for row in rows):
        raise InstanceError("each instance must be an object with the columns, as the first one is")
    names = dict.fromkeys(name for row in rows for name in row)
    table = Table(
        kind="jsonl",
        place="the request",
        unit="instance",
        columns={name: Values([row.get(name) for row in rows]) for name in names},
        lines=np.arange(len(rows)),
    )
    try:
        found = of_table(table, schema.features)
        every = np.arange(found.num_records)
        columns = [(feature, found.columns[feature.name][every]) for feature in schema.features]
        if found.num_records != len(rows):
            raise InstanceError("each instance must be a row that the training could have had")
        return [
            example_of(
                {f: own[row] if f.dtype == STRING else np.asarray(own[row]) for f, own in columns}
            )
            for row in range(len(rows))
        ]
    except TfdistError as error:  # It may show half a surrogate, which no answer can have.
        raise InstanceError(str(error).encode(errors="replace").decode()) from None
    except UnicodeError:
        raise InstanceError("text must be Unicode without halves of surrogates") from None


def _values(schema: Schema, instance: Any, pixels: _Pixels) -> dict[Feature, Any]:
    names = {feature.name for feature in schema.features}
    if len(names) == 1 and not (isinstance(instance, Mapping) and set(instance) == names):
        return {schema.features[0]: _value(schema.features[0], instance, pixels)}
    if not isinstance(instance, Mapping) or set(instance) != names:
        raise InstanceError(f"must be an object with {', '.join(sorted(names))}")
    return {feature: _value(feature, instance[feature.name], pixels) for feature in schema.features}


def _value(feature: Feature, value: Any, pixels: _Pixels) -> Any:
    if feature.is_image:
        return _photo(feature, value, pixels)
    if feature.dtype == STRING:
        return _strings(feature, value)
    if feature.classes is not None and (feature.columns or isinstance(value, str)):
        value = _class_id(feature, value)
    elif is_date(feature) and isinstance(value, str):
        value = _seconds(feature, value)
    return _array(feature, value)


def _class_id(feature: Feature, value: Any) -> int:
    """Returns the number of a category. In a table 7 is the category "7", as in its rows."""
    name = "" if value is None else str(value) if type(value) is int else value
    if not isinstance(name, str) or name not in feature.classes:
        raise InstanceError(f"'{feature.name}' must be one of its categories, by its name")
    return feature.classes.index(name)


def _seconds(feature: Feature, text: str) -> int:
    order = feature.day_first
    dated = text.strip() if order is None else year_first(text.strip(), is_day_first=order)
    (found,), _ = dates_of([dated])
    if found is None:
        raise InstanceError(f"'{feature.name}' must be a date, written as 2024-12-31")
    return found


def _bytes(feature: Feature, value: Any) -> bytes | None:
    """Returns the bytes that a value holds, None where it is something else."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, Mapping) or set(value) != {B64}:
        return None
    try:
        return base64.b64decode(value[B64], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InstanceError(f"'{feature.name}' must be base64") from None


def _strings(feature: Feature, value: Any) -> bytes | list[bytes]:
    if feature.shape:
        flat = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
        if not flat or (feature.shape[0] not in (None, len(flat)) or len(feature.shape) > 1):
            raise InstanceError(f"'{feature.name}' must be strings of shape {feature.shown_shape}")
        alone = replace(feature, shape=())
        return [_strings(alone, one) for one in flat]
    found = _bytes(feature, value)
    if found is None and isinstance(value, str):
        found = value.encode(errors="replace")
    if found is None:
        raise InstanceError(f"'{feature.name}' must be a string")
    return found


def _array(feature: Feature, value: Any) -> np.ndarray:
    """Returns the numbers of a feature in its dtype, none of them changed by that."""
    what = f"'{feature.name}' must be {feature.dtype} of shape {feature.shown_shape}"
    try:
        with np.errstate(over="raise", invalid="raise"):  # Else NumPy warns of what does not fit.
            given = np.asarray(value)
            if given.dtype.kind not in "biuf" or given.dtype == object:
                raise InstanceError(what)
            array = given.astype(feature.dtype)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        raise InstanceError(what) from None
    shape = (array.shape[:1] if feature.is_ragged else feature.shape[:1]) + feature.shape[1:]
    if array.shape != shape:
        raise InstanceError(f"{what}, but has shape {list(array.shape)}")
    if array.dtype.kind in "biu" and not np.array_equal(array, given):
        raise InstanceError(f"{what}, but has values that are no {feature.dtype}")
    return np.ascontiguousarray(array)


def _photo(feature: Feature, value: Any, pixels: _Pixels) -> bytes:
    """Returns the bytes of a photo, made anew where the training's shards would have had it so."""
    from tfdist.records.format.image_bytes import UNREADABLE, Image
    from tfdist.records.writing.images.files import header_of, rewritten

    data = _bytes(feature, value)
    if data is None:
        raise InstanceError(f"'{feature.name}' must be the file of an image, as {{\"b64\": ...}}")
    Image.init()  # WebP is not among those that Pillow begins with.
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            pixels.add(image.width * image.height)
            header = header_of(image)
            if isinstance(header, str):
                raise InstanceError(f"'{feature.name}': {header}")
            if header.dtype != feature.dtype:
                raise InstanceError(f"'{feature.name}' must have pixels of {feature.dtype}")
            return data if header.convert_to is None else rewritten(image, header)
    except UNREADABLE:
        raise InstanceError(f"'{feature.name}' must be an image that can be read") from None
