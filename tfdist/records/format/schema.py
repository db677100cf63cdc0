"""What one record holds: its features, in the order in which they are written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import DataError

# "raw" is the little-endian bytes of the array in a BytesList, "int64" an Int64List, "float" a
# FloatList, "bytes" a BytesList with a string for each value; "jpeg" and "png" are the bytes of an
# image file, "image" of either of the two.
ENCODINGS = ("raw", "int64", "float", "bytes", "jpeg", "png", "image")
IMAGE_ENCODINGS = ("jpeg", "png", "image")
ROLES = ("input", "label", "weight")
STRING = "string"
FITS = ("stretch", "crop", "pad")

# TensorFlow counts the bytes of a string in 32 bits.
_MOST_VALUES = (1 << 31) - 1

# What tf.io.decode_raw can decode, minus the complex types that no Keras layer takes.
RAW_DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What becomes of a feature when it is read: it can be changed without writing records anew.

    Attributes:
        size: height and width that images are resized to; None keeps those they have.
        fit: how they get there: "stretch" changes the proportions, "crop" cuts off what is too
            much around the middle, "pad" fills what is missing with zeros.
        channels: 1 for gray, 3 for colour; None keeps those of the schema.
        length: of features of variable length, the entries of each record: what is missing is
            filled with ``fill``, what is more is cut off. None: as many as the longest record has.
        fill: what they are filled with; strings are filled with "".
        offset: what is subtracted from whole numbers: class ids of others often begin at 1.
        upright: whether JPEG images are turned as their EXIF says; the shape is then that of the
            turned image.
    """

    size: tuple[int, int] | None = None
    fit: str = "stretch"
    channels: int | None = None
    length: int | None = None
    fill: float = 0
    offset: int = 0
    upright: bool = False

    def to_json(self) -> dict[str, Any]:
        usual = Reading()
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        value = {name: item for name, item in said.items() if item != getattr(usual, name)}
        return value if self.size is None else {**value, "size": list(self.size)}

    @classmethod
    def from_json(cls, feature: str, value: Any) -> Reading:
        """Returns what ``to_json`` described. Raises DataError for anything else."""
        known = {
            "size": lambda size: _are_sizes(size) and len(size) == 2,
            "fit": lambda fit: fit in FITS,
            "channels": lambda channels: channels in (1, 3),
            "length": lambda length: type(length) is int and 0 < length <= _MOST_VALUES,
            "fill": lambda fill: type(fill) in (int, float),
            "offset": lambda offset: type(offset) is int and abs(offset) <= _MOST_VALUES,
            "upright": lambda upright: type(upright) is bool,
        }
        if not isinstance(value, Mapping) or not all(
            key in known and known[key](item) for key, item in value.items()
        ):
            raise DataError(
                f"how feature '{feature}' is read must be said with {', '.join(known)}",
                received=repr(value),
            )
        size = value.get("size")
        return cls(**{**value, "size": None if size is None else tuple(size)})


AS_STORED = Reading()


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One named tensor of every record.

    Attributes:
        name: key in the tf.train.Example.
        dtype: dtype of the decoded tensor, a name of ``RAW_DTYPES`` or "string".
        shape: shape of the tensor of one record as it is stored, without a batch dimension. None
            is a size that differs from record to record: the first of any feature, or height and
            width of images.
        encoding: one of ``ENCODINGS``.
        role: "input", "label" or "weight".
        classes: for a label of class ids, or an input of categories, the name of each id; None when
            they have no names.
        columns: for features packed from the columns of a table, the name of each column.
        day_first: of dates of a table, whether they are written as 31/12/2024 there; False as
            12/31/2024, None as neither.
        longest: of a feature of variable length, the most entries that a record has.
        reading: what becomes of it when it is read.
        in_list: whether it is a feature list of a tf.train.SequenceExample, a step an entry.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str
    role: str
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    day_first: bool | None = None
    longest: int | None = None
    reading: Reading = AS_STORED
    in_list: bool = False

    @property
    def is_image(self) -> bool:
        return self.encoding in IMAGE_ENCODINGS

    @property
    def is_ragged(self) -> bool:
        """Whether records have different numbers of entries."""
        return self.shape[:1] == (None,) and not self.is_image

    @property
    def is_boxes(self) -> bool:
        """Whether it is a label of any number of four numbers, as the boxes of an image are."""
        is_float = self.dtype in ("float32", "float64")
        return self.role == "label" and is_float and self.shape == (None, 4)

    @property
    def varies(self) -> bool:
        """Whether its bytes differ in number from record to record."""
        return self.is_image or self.is_ragged or self.dtype == STRING

    @property
    def read_shape(self) -> tuple[int | None, ...]:
        """Shape of the tensor of one record as it is read; None where images keep their sizes."""
        if self.is_image:
            height, width = self.reading.size or self.shape[:2]
            return height, width, self.reading.channels or self.shape[2]
        if self.is_ragged:
            return self.reading.length or self.longest, *self.shape[1:]
        return self.shape

    @property
    def shown_shape(self) -> str:
        """The shape as tables show it, with a star for what differs from record to record."""
        return f"[{', '.join('*' if size is None else str(size) for size in self.shape)}]"

    @property
    def num_values(self) -> int:
        """Number of values of the tensor of one record, which must not be ragged."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded tensor of one record, which must hold numbers, as many in each."""
        return self.num_values * np.dtype(self.dtype).itemsize

    @property
    def is_class_id(self) -> bool:
        """Whether each record has one integer label: the number of its class."""
        is_number = self.dtype != STRING and np.dtype(self.dtype).kind in "iu"
        return self.role == "label" and self.shape == () and is_number

    def to_json(self) -> dict[str, Any]:
        value = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "role": self.role,
            "classes": None if self.classes is None else list(self.classes),
            "columns": None if self.columns is None else list(self.columns),
        }
        if self.day_first is not None:
            value["day_first"] = self.day_first
        if self.longest is not None:
            value["longest"] = self.longest
        if self.reading != AS_STORED:
            value["reading"] = self.reading.to_json()
        if self.in_list:
            value["in_list"] = True
        return value

    @classmethod
    def from_json(cls, value: Any) -> Feature:
        """Returns the feature that ``to_json`` described. Raises DataError for anything else."""
        if not isinstance(value, Mapping):
            raise DataError("a feature of the schema must be a JSON object", received=repr(value))
        name = value.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise DataError(
                "a feature of the schema must have a name of letters that can be shown",
                received=repr(name),
            )
        encoding = value.get("encoding")
        dtypes = (STRING,) if encoding == "bytes" else RAW_DTYPES
        for key, known in (("encoding", ENCODINGS), ("role", ROLES), ("dtype", dtypes)):
            if value.get(key) not in known:
                raise DataError(
                    f"the {key} of feature '{name}' must be one of {', '.join(known)}",
                    received=repr(value.get(key)),
                )
        shape = _shape_from_json(name, encoding, value.get("shape"))
        longest = value.get("longest")
        is_ragged = shape[:1] == (None,) and encoding not in IMAGE_ENCODINGS
        if is_ragged != (type(longest) is int and 0 < longest <= _MOST_VALUES):
            raise DataError(
                f"feature '{name}' must say how long its longest record is, if they differ",
                received=f"shape {list(shape)}, longest {longest!r}",
            )
        return cls(
            name=name,
            dtype=value["dtype"],
            shape=shape,
            encoding=encoding,
            role=value["role"],
            classes=_names(name, "classes", value.get("classes")),
            columns=_names(name, "columns", value.get("columns")),
            day_first=_day_first(name, value.get("day_first")),
            longest=longest,
            reading=Reading.from_json(name, value.get("reading", {})),
            in_list=_in_list(name, is_ragged, value.get("in_list", False)),
        )


def _day_first(name: str, value: Any) -> bool | None:
    if value is not None and type(value) is not bool:
        raise DataError(
            f"feature '{name}' must say with true or false whether days come first in its dates",
            received=repr(value),
        )
    return value


def _in_list(name: str, is_ragged: bool, value: Any) -> bool:
    if type(value) is not bool or (value and not is_ragged):
        raise DataError(
            f"feature '{name}' must be of variable length to be a feature list",
            received=f"in_list {value!r}",
        )
    return value


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)


def _shape_from_json(name: str, encoding: str, shape: Any) -> tuple[int | None, ...]:
    is_image = encoding in IMAGE_ENCODINGS
    # How many sizes may differ: all of them at once, or none.
    free = 2 if is_image else 1
    known = shape
    if isinstance(shape, list) and shape[:free] == [None] * free:
        known = shape[free:]
    if not _are_sizes(known) or (is_image and len(shape) != 3):
        raise DataError(
            f"the shape of feature '{name}' must be a list of positive integers",
            received=repr(shape),
            mend="A null in the first place stands for a size that differs from record to record",
        )
    if math.prod(known) > _MOST_VALUES:
        raise DataError(
            f"feature '{name}' must have at most {_MOST_VALUES} values a record",
            received=f"shape {shape}",
        )
    return tuple(shape)


def _names(feature: str, key: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"the {key} of feature '{feature}' must be a list of names", received=value)
    return tuple(value)


@dataclass(frozen=True)
class Schema:
    """The features of every record, in the order in which they are written.

    A record is read as ``(x, y)`` or ``(x, y, sample_weight)``. One input is a tensor, several are
    a dict of tensors by name; labels likewise. A schema without a label is read as ``(x,)``.
    """

    features: tuple[Feature, ...]

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise DataError(
                "each feature must have a name of its own",
                received=", ".join(names),
                mend="Rename one of them",
            )
        if not self.of_role("input"):
            raise DataError(
                "a record must have at least one input",
                received=", ".join(names) or "none",
                mend="Make one of them an input",
            )
        if len(self.of_role("weight")) > 1:
            raise DataError(
                "a record must have at most one sample weight",
                received=", ".join(names),
                mend="Keep one of them",
            )

    def of_role(self, role: str) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.role == role)

    @property
    def has_weights(self) -> bool:
        return bool(self.of_role("weight"))

    @property
    def class_label(self) -> Feature | None:
        """The one label of class ids, or None when there is none or there are several labels."""
        labels = self.of_role("label")
        return labels[0] if len(labels) == 1 and labels[0].is_class_id else None

    @property
    def is_sequence_example(self) -> bool:
        """Whether records are tf.train.SequenceExamples, as far as they are read."""
        return any(feature.in_list for feature in self.features)

    @property
    def is_plain(self) -> bool:
        """Whether all that it says could be said in format version 1."""
        return all(
            None not in feature.shape and feature.dtype != STRING and feature.reading == AS_STORED
            for feature in self.features
        )

    def nest(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arranges tensors by name as ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""
        items = [_one_or_dict(self.of_role("input"), tensors)]
        if self.of_role("label"):
            items.append(_one_or_dict(self.of_role("label"), tensors))
        if self.has_weights:
            items.append(tensors[self.of_role("weight")[0].name])
        return tuple(items)

    def to_json(self) -> list[dict[str, Any]]:
        return [feature.to_json() for feature in self.features]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Returns the schema that ``to_json`` described. Raises DataError for anything else."""
        if not isinstance(value, list):
            raise DataError("the schema must be a list of features", received=repr(value))
        return cls(tuple(Feature.from_json(item) for item in value))

    def checked(self) -> Schema:
        """Returns the same. Raises DataError where a manifest could not give it back."""
        text = json.dumps(self.to_json(), ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # Bytes in the names of files that are no UTF-8 are halves of letters to Python.
            raise DataError(
                "names of features, columns and classes must be text of UTF-8",
                received=repr(text[max(0, error.start - 20) : error.end]),
                mend="Rename the folder or the column",
            ) from None
        return self.from_json(json.loads(text))


def _one_or_dict(features: Sequence[Feature], tensors: Mapping[str, Any]) -> Any:
    if len(features) == 1:
        return tensors[features[0].name]
    return {feature.name: tensors[feature.name] for feature in features}
