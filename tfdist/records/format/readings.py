"""What a user says of how features are read, put into a schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfdist.errors import DataError, OptionError, spelt, unknown_choice
from tfdist.records.format.schema import AS_STORED, FITS, Feature, Reading, Schema

COLORS = {"gray": 1, "rgb": 3}
#: Takes a choice back: what is stored is read as it is.
_BACK = "none"
# What the choices that can be taken back say of how a feature is read.
_FIELDS = {"resize": ("size", "fit"), "color": ("channels",), "max_length": ("length",)}


def parse_size(text: str | tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of "224x224" or (224, 224). Raises OptionError."""
    found = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text) if isinstance(text, str) else None
    if found is not None:
        return int(found[1]), int(found[2])
    if isinstance(text, tuple) and len(text) == 2 and all(type(n) is int and n > 0 for n in text):
        return text
    raise OptionError(
        "resize must be HEIGHTxWIDTH, such as 224x224, or a tuple of two numbers",
        received=repr(text),
        mend=f"Write {spelt('resize', '224x224')}",
    )


def check_choices(fit: str | None, color: str | None) -> None:
    """Raises OptionError for words that are not known."""
    for name, chosen, known in (("fit", fit, FITS), ("color", color, list(COLORS))):
        if chosen is not None and chosen not in known:
            raise unknown_choice(name, chosen, known)


def with_readings(
    schema: Schema,
    *,
    resize: str | tuple[int, int] | None = None,
    fit: str | None = None,
    color: str | None = None,
    max_length: int | None = None,
) -> Schema:
    """Returns the schema with other readings; what is None stays as it is.

    Args:
        resize: of all images: "HxW" or (height, width).
        fit: "stretch", "crop" or "pad"; see ``schema.Reading``.
        color: of all images but masks, which are labels: "gray" or "rgb".
        max_length: of all features of variable length: the entries of each record.

    Raises:
        OptionError: an unknown choice.
        DataError: the schema has nothing that the option could be of, or boxes of images that
            would be cropped or padded.
    """
    check_choices(fit, color)
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise OptionError(
            "max_length must be a whole number of at least 1",
            received=repr(max_length),
            mend="Choose 1 or more",
        )
    of_images = {"size": None if resize is None else parse_size(resize), "fit": fit}
    schema = _changed(schema, "resize and fit", "an image", lambda f: f.is_image, of_images)
    check_boxes(schema)
    channels, what = {"channels": COLORS.get(color)}, "an image as an input"
    # The pixels of a mask are numbers.
    schema = _changed(schema, "color", what, lambda f: f.is_image and f.role != "label", channels)
    length, what = {"length": max_length}, "a feature of variable length"
    return _changed(schema, "max_length", what, lambda f: f.is_ragged, length)


def read_as_said(schema: Schema, said: Mapping[str, Any]) -> Schema:
    """Returns the schema with other readings.

    Args:
        said: the options of ``with_readings``. What is "none" is taken back, what is None
            stays as it is.

    Raises:
        OptionError, DataError: a choice that cannot be.
    """
    taken = [option for option in _FIELDS if said[option] == _BACK]
    if taken:
        usual = {name: getattr(AS_STORED, name) for option in taken for name in _FIELDS[option]}
        features = (replace(f, reading=replace(f.reading, **usual)) for f in schema.features)
        schema = Schema(tuple(features))
    return with_readings(schema, **{**said, **dict.fromkeys(taken)})


def check_boxes(schema: Schema) -> None:
    """Raises DataError where images are cut or filled up, and boxes would stay where they are."""
    boxes = [feature.name for feature in schema.features if feature.is_boxes]
    fits = {f.reading.fit for f in schema.features if f.is_image and f.reading.size is not None}
    fits.discard("stretch")
    if boxes and fits:
        raise refuse_boxes(boxes[0], fits.pop())


def refuse_boxes(name: str, fit: str) -> DataError:
    """Returns the error for boxes of images that are cut or filled up."""
    return DataError(
        "images with boxes must be stretched where they are resized, as boxes are not moved",
        received=f"fit {fit} beside '{name}'",
        mend="Leave crop and pad out; boxes relative to height and width then stay right",
    )


def notes_of_boxes(schema: Schema) -> Iterator[str]:
    """Yields what is to be said of boxes whose numbers are not looked at."""
    boxes = [feature.name for feature in schema.features if feature.is_boxes]
    if boxes and any(f.is_image and f.reading.size is not None for f in schema.features):
        yield (
            f"a resize leaves the numbers of {', '.join(boxes)} as they are: where these are "
            "boxes, they must be relative to height and width"
        )


def _changed(
    schema: Schema, options: str, what: str, holds: Callable[[Feature], bool], said: dict[str, Any]
) -> Schema:
    said = {name: value for name, value in said.items() if value is not None}
    if not said:
        return schema
    if not any(holds(feature) for feature in schema.features):
        names = ", ".join(feature.name for feature in schema.features)
        raise DataError(
            f"{options} must be said of records that have {what}",
            received=f"records of {names}",
            mend="Leave it out",
        )

    def changed(feature: Feature) -> Reading:
        return replace(feature.reading, **said) if holds(feature) else feature.reading

    return Schema(tuple(replace(feature, reading=changed(feature)) for feature in schema.features))
