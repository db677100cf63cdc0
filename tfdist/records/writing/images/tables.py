"""The labels of images from a table beside them: see ``labels`` and ``label_values``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import Column
from tfdist.records.format.schema import Feature
from tfdist.records.format.splits import SPLITS
from tfdist.records.writing.images.files import Header
from tfdist.records.writing.images.label_values import label_columns, missing
from tfdist.records.writing.images.labels import match, read_label_rows
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import FoundImage, split_name
from tfdist.records.writing.roles import Asked

_SPLIT = "split"


class ImageTable:
    """A labels file, and the row of each image.

    Attributes:
        path: of the file, or of the folder with COCO's.
        files: those that it was read from.
        astray: the rows without an image.

    Raises:
        DataError: a file that is no such table, or a column that it does not have.
    """

    def __init__(self, path: str | Path, folder: Path, images: Sequence[FoundImage], asked: Asked):
        self._table = read_label_rows(path, folder)
        self.path, self.files = self._table.path, self._table.files
        matched = match(self._table, [image.name for image in images])
        self._column, self._rows = matched.column, matched.rows
        self.astray = matched.astray
        self._client = asked.client
        if asked.client is not None:
            self._check_there([asked.client])
        self._is_divided = any(image.split is not None for image in images)
        self._split = self._split_column(asked)
        self._labels = self._label_names(asked)

    def faults(self, headers: Sequence[Header | str]) -> Iterator[tuple[int, str]]:
        """Yields images, by their numbers, that have no row, one with a gap or of another size."""
        needed = [*self._labels, *filter(None, [self._client])]
        for image, row in enumerate(self._rows):
            if row is None:
                yield image, f"has no row in {self._table.path.name}"
                continue
            gaps = [name for name in needed if missing(self._table.rows[row].get(name))]
            if gaps:
                yield image, f"{self._table.places[row]} has no {', '.join(gaps)}"
            elif self._table.sizes is not None and isinstance(headers[image], Header):
                size, (height, width) = headers[image], self._table.sizes[row]
                if (size.height, size.width) != (height, width):
                    yield (
                        image,
                        f"{size.width}x{size.height} pixels where {self._table.places[row]} has "
                        f"{width}x{height}",
                    )

    def labels(self, kept: Sequence[int]) -> dict[str, tuple[Feature, Column]]:
        """Returns the labels of some images by name."""
        columns = {name: self._values(name, kept) for name in self._labels}
        found = label_columns(columns, str(self._table.path), self._table.classes)
        return {column.feature.name: (column.feature, column.values) for column in found}

    def owners(self, kept: Sequence[int]) -> np.ndarray | None:
        if self._client is None:
            return None
        return np.array([str(value) for value in self._values(self._client, kept)], object)

    def splits(self, kept: Sequence[int]) -> list[str] | None:
        """Returns the split of each image where a column names it."""
        if self._split is None:
            return None
        return [split_name(str(value)) for value in self._values(self._split, kept)]

    def roles(self) -> tuple[tuple[str, str], ...]:
        """Returns (name, what it has become) of each column."""
        return tuple((name, self._role(name)) for name in self._table.names)

    def _role(self, name: str) -> str:
        if name in self._labels:
            return "label and client" if name == self._client else "label"
        known = {self._column: "name of the file", self._split: "split", self._client: "client"}
        return known.get(name, "dropped")

    def _values(self, name: str, images: Sequence[int]) -> list[Any]:
        return [self._table.rows[self._rows[image]].get(name) for image in images]

    def _split_column(self, asked: Asked) -> str | None:
        """Returns the column called "split", unless folders divide, or it is a label."""
        named = [name for name in self._table.names if name.lower() == _SPLIT]
        if not named or self._is_divided or named[0] in (*_names(asked.label), asked.client):
            return None
        words = [row.get(named[0]) for row in self._table.rows]
        are_splits = all(split_name(str(word)) in SPLITS for word in words)
        return named[0] if are_splits else None

    def _label_names(self, asked: Asked) -> list[str]:
        free = [
            name
            for name in self._table.names
            if name not in (self._column, self._split, self._client)
        ]
        if asked.inputs is not None:
            raise DataError(
                "the inputs of images must be the images", received="inputs beside labels"
            )
        chosen, drop = _names(asked.label), _names(asked.drop)
        self._check_there([*chosen, *drop])
        labels = chosen or [name for name in free if name not in drop]
        if not labels:
            raise DataError(
                f"{self._table.path} must have a label beside the column '{self._column}'",
                received=f"columns {', '.join(self._table.names)}",
            )
        return labels

    def _check_there(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._table.names:
                raise DataError(
                    f"{self._table.path} must have the column '{name}'",
                    received=f"columns {', '.join(self._table.names)}",
                )

    def notes(
        self, found: Mapping[str, tuple[Feature, Column]], options: ImageOptions
    ) -> Iterator[str]:
        yield from self._table.notes
        boxes = [
            feature.name
            for feature, _ in found.values()
            if feature.role == "label"
            and feature.is_ragged
            and len(feature.shape) == 2
            and not feature.is_boxes  # Those are looked at.
        ]
        if boxes and options.is_resized:
            yield f"a resize leaves the numbers of {', '.join(boxes)} as they are"


def _names(given: str | Sequence[str] | None) -> list[str]:
    if isinstance(given, str):
        return [name.strip() for name in given.split(",")]
    return list(given or ())
