"""From what was found under a key to the feature of a schema that reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfdist.records.adopting.feature_statistics import Found
from tfdist.records.adopting.tfds import Told
from tfdist.records.format.schema import IMAGE_ENCODINGS, RAW_DTYPES, STRING, Feature, Reading

_NAMES = {"int64": "whole numbers", "float": "numbers", "bytes": "text"}


@dataclass(frozen=True, kw_only=True)
class Described:
    """One key of the records: what it could become.

    Attributes:
        name: the key.
        kind: what its values are, in words.
        dtype, encoding, shape, longest: of the feature; see ``schema.Feature``.
        problem: why it cannot be read, such as could follow "which has"; None when it can.
        notes: what is to be said where it is read, a sentence each.
        upright: whether some images are turned, as their EXIF says.
    """

    name: str
    kind: str
    dtype: str
    encoding: str
    shape: tuple[int | None, ...]
    found: Found
    longest: int | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    upright: bool = False

    @property
    def is_image(self) -> bool:
        return self.encoding in IMAGE_ENCODINGS

    @property
    def is_whole(self) -> bool:
        """Whether each record has one whole number."""
        return self.shape == () and self.encoding == "int64" and not self.problem

    @property
    def shown_shape(self) -> str:
        return "" if self.problem else self.feature("input").shown_shape

    def feature(self, role: str) -> Feature:
        """Returns the feature; labels and weights in the dtypes of fit."""
        dtype = self.dtype
        if role == "weight":
            dtype = "float32"
        elif role == "label" and self.is_whole:
            dtype = "int64"
        elif role == "label" and dtype == "float64" and self.encoding == "float":
            dtype = "float32"
        return Feature(
            name=self.name,
            dtype=dtype,
            shape=self.shape,
            encoding=self.encoding,
            role=role,
            classes=self.classes if role == "label" and self.is_whole else None,
            longest=self.longest,
            in_list=self.found.in_list,
            reading=Reading(upright=self.upright),
        )


def describe(name: str, found: Found, records: int, told: Told | None) -> Described:
    """Returns what a key could become.

    Args:
        records: how many were looked at.
        told: what the folder says of the key.
    """
    kinds = found.kinds - {"none"}
    if len(kinds) != 1:
        lists = " and ".join(sorted(kinds)) or "no values"
        return _of(name, "bytes", found, kind="values of several kinds", problem=f"{lists} lists")
    (kind,) = kinds
    missing = records - found.records
    if kind == "bytes" and found.values and found.images:
        return _image(name, found, missing, told)
    if kind == "bytes" and told is not None and told.is_raw:
        return _raw(name, found, missing, told)
    described = _listed(name, kind, found, missing, told)
    if kind == "bytes" and found.texts < found.values:
        if found.other is not None:
            problem = f"{found.other} images, where JPEG and PNG are read"
            return _of(name, kind, found, kind=f"{found.other} images", problem=problem)
        note = f"'{name}' holds bytes that are no text: they are read as strings, not decoded"
        described = replace(described, kind="bytes", notes=(*described.notes, note))
    return described


def _listed(name: str, kind: str, found: Found, missing: int, told: Told | None) -> Described:
    """Returns numbers or strings, as many in each record or not."""
    dtype = {"int64": "int64", "float": "float32", "bytes": STRING}[kind]
    if told is not None and kind != "bytes" and told.dtype in RAW_DTYPES:
        dtype = told.dtype
    common = {"dtype": dtype, "classes": None if told is None else told.classes}
    if found.in_list:
        if found.step < 1:
            return _of(name, kind, found, problem="steps of different lengths")
        inner = () if found.step == 1 else (found.step,)
        return _of(name, kind, found, shape=(None, *inner), longest=max(1, found.most), **common)
    fewest = 0 if missing else found.fewest
    shape = None if told is None else told.shape
    if shape is not None and None not in shape and fewest == found.most == math.prod(shape):
        return _of(name, kind, found, shape=shape, **common)
    inner = (shape or ())[1:]
    if shape and shape[0] is None and None not in inner and math.prod(inner):
        size = math.prod(inner)
        if found.fewest % size == found.most % size == 0:
            longest = max(1, found.most // size)
            return _of(name, kind, found, shape=(None, *inner), longest=longest, **common)
    if fewest == found.most:
        return _of(name, kind, found, shape=() if fewest == 1 else (fewest,), **common)
    note = (f"{missing:,} records have no '{name}': it is read as a list of variable length",)
    return _of(
        name,
        kind,
        found,
        shape=(None,),
        longest=found.most,
        notes=note if missing else (),
        **common,
    )


def _image(name: str, found: Found, missing: int, told: Told | None) -> Described:
    heads = found.heads
    formats = {head.format for head in heads}
    encoding = next(iter(formats)) if len(formats) == 1 else "image"
    sizes = {(head.height, head.width) for head in heads}
    channels = {head.channels for head in heads}
    # 2 is gray and 4 is colour with a mask; a mask is kept where all have one.
    merged = 4 if channels == {4} and encoding == "png" else 3 if channels & {3, 4} else 1
    if told is not None and told.channels in (1, 3, 4) and encoding != "jpeg":
        merged = told.channels
    size = next(iter(sizes)) if len(sizes) == 1 and 0 not in next(iter(sizes)) else (None, None)
    deep = encoding == "png" and {head.bits for head in heads} == {16}
    notes = []
    if len(channels) > 1:
        counts = ", ".join(
            f"{sum(n for h, n in heads.items() if h.channels == c):,} of {c} channels"
            for c in sorted(channels)
        )
        notes.append(f"the images of '{name}' are read with {merged} channels: they are {counts}")
    turned = sum(number for head, number in heads.items() if head.is_turned)
    if turned:
        notes.append(
            f"{turned:,} images of '{name}' say in EXIF that they are to be turned: they are read "
            "upright"
        )
    cut = 0 if deep else sum(number for head, number in heads.items() if head.bits == 16)
    if cut:
        notes.append(f"{cut:,} images of '{name}' have 16 bits, of which the upper 8 are read")
    problem = None
    if found.in_list or found.most > 1:
        problem = "several images in a record"
    elif found.images < found.values:
        problem = f"{found.values - found.images:,} values that are no JPEG or PNG image"
    elif missing or not found.fewest:
        problem = f"no image in {missing:,} records" if missing else "no image in some records"
    return _of(
        name,
        "bytes",
        found,
        kind={"jpeg": "JPEG images", "png": "PNG images"}.get(encoding, "images"),
        dtype="uint16" if deep else "uint8",
        encoding=encoding,
        shape=(*size, merged),
        problem=problem,
        notes=tuple(notes),
        upright=turned > 0,
    )


def _raw(name: str, found: Found, missing: int, told: Told) -> Described:
    expected = math.prod(told.shape) * np.dtype(told.dtype).itemsize
    is_whole = not missing and found.fewest == found.most == 1 and found.binary == expected
    return _of(
        name,
        "bytes",
        found,
        kind="bytes of an array",
        dtype=told.dtype,
        encoding="raw",
        shape=told.shape,
        problem=None if is_whole else f"other than {expected} bytes in some records",
    )


def _of(name: str, stored: str, found: Found, **rest: Any) -> Described:
    usual = {"kind": _NAMES[stored], "dtype": "int64", "encoding": stored, "shape": ()}
    return Described(name=name, found=found, **{**usual, **rest})
