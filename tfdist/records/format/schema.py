"""What one record holds: its features, in the order in which they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import DataError

# "raw" is the little-endian bytes of the array in a BytesList, "int64" an Int64List, "float" a
# FloatList; "jpeg" and "png" are the bytes of an image file, "image" of either of the two.
ENCODINGS = ("raw", "int64", "float", "jpeg", "png", "image")
IMAGE_ENCODINGS = ("jpeg", "png", "image")
ROLES = ("input", "label", "weight")

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
class Feature:
    """One named tensor of every record.

    Attributes:
        name: key in the tf.train.Example.
        dtype: dtype of the decoded tensor, a name of ``RAW_DTYPES``.
        shape: shape of the decoded tensor of one record, without a batch dimension.
        encoding: one of ``ENCODINGS``.
        role: "input", "label" or "weight".
        classes: for a label of class ids, the name of each id; None when they have no names.
        columns: for features packed from the columns of a table, the name of each column.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str
    role: str
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

    @property
    def num_values(self) -> int:
        """Number of values of the tensor of one record."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded tensor of one record."""
        return self.num_values * np.dtype(self.dtype).itemsize

    @property
    def is_class_id(self) -> bool:
        """Whether each record has one integer label: the number of its class."""
        return self.role == "label" and self.shape == () and np.dtype(self.dtype).kind in "iu"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "role": self.role,
            "classes": None if self.classes is None else list(self.classes),
            "columns": None if self.columns is None else list(self.columns),
        }

    @classmethod
    def from_json(cls, value: Any) -> Feature:
        """Returns the feature that ``to_json`` described. Raises DataError for anything else."""
        if not isinstance(value, Mapping):
            raise DataError("a feature of the schema must be a JSON object", received=repr(value))
        name = value.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise DataError("a feature of the schema must have a name", received=repr(name))
        shape = value.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise DataError(
                f"the shape of feature '{name}' must be a list of positive integers",
                received=repr(shape),
            )
        if math.prod(shape) > _MOST_VALUES:
            raise DataError(
                f"feature '{name}' must have at most {_MOST_VALUES} values a record",
                received=f"shape {shape}",
            )
        for key, known in (("dtype", RAW_DTYPES), ("encoding", ENCODINGS), ("role", ROLES)):
            if value.get(key) not in known:
                raise DataError(
                    f"the {key} of feature '{name}' must be one of {', '.join(known)}",
                    received=repr(value.get(key)),
                )
        return cls(
            name=name,
            dtype=value["dtype"],
            shape=tuple(shape),
            encoding=value["encoding"],
            role=value["role"],
            classes=_names(name, "classes", value.get("classes")),
            columns=_names(name, "columns", value.get("columns")),
        )


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
            raise DataError("each feature must have a name of its own", received=", ".join(names))
        if not self.of_role("input"):
            raise DataError(
                "a record must have at least one input", received=", ".join(names) or "none"
            )
        if len(self.of_role("weight")) > 1:
            raise DataError(
                "a record must have at most one sample weight", received=", ".join(names)
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
    def num_bytes(self) -> int:
        """Bytes of one decoded record."""
        return sum(feature.num_bytes for feature in self.features)

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


def _one_or_dict(features: Sequence[Feature], tensors: Mapping[str, Any]) -> Any:
    if len(features) == 1:
        return tensors[features[0].name]
    return {feature.name: tensors[feature.name] for feature in features}
