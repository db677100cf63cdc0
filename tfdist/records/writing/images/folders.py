"""A folder of images, in class folders or with a file, or masks, that say what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.columns import Column, Columns, column_of
from tfdist.records.format.readings import refuse_boxes
from tfdist.records.format.schema import Feature, Reading, Schema
from tfdist.records.format.splits import rows_of_splits
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.wording import left_out, listed
from tfdist.records.writing.images.coco import FOLDER as COCO_FOLDER
from tfdist.records.writing.images.coco import MOST_RELATIVE, annotation_files
from tfdist.records.writing.images.files import Header, ImageFiles, Resizing, read_headers
from tfdist.records.writing.images.labels import plain
from tfdist.records.writing.images.notes import notes_of_files, notes_of_folders, notes_of_masks
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import FoundImage, find_images
from tfdist.records.writing.roles import Asked

_MASK = "mask"
_BAD_SHOWN = 20
# More of them are named by their path below the folder.
_WHOLE_PATHS = 3


def from_image_folder(folder: Path, asked: Asked, options: ImageOptions) -> Columns:
    """Returns the images of FOLDER/CLASS/, FOLDER/SPLIT/CLASS/ or, with labels, of FOLDER.

    JPEG and PNG files are written byte for byte, of whatever size; others that Pillow reads become
    PNG. "image" has as many channels as the image with most of them. Class folders give "label",
    the numbers of their sorted names; else the labels are those of ``options.labels``, or of
    COCO's files in FOLDER/annotations. Masks are "mask", an image with the role of a label.

    Raises:
        DataError: images that lie elsewhere or cannot be read, those of 8 bits among those of 16,
            or rows and masks that do not fit them; all bad files are named.
    """
    if options.labels is options.masks is None and annotation_files(folder / COCO_FOLDER):
        options = replace(options, labels=folder / COCO_FOLDER)
    loose = options.labels is not None or options.masks is not None
    listing = find_images(folder, loose=loose, without=options.masks)
    images = listing.images
    headers = read_headers([image.path for image in images], options)
    faults = _Faults(folder, images, headers, options)
    table = masks = None
    if options.labels is not None:
        from tfdist.records.writing.images.tables import ImageTable

        table = ImageTable(options.labels, folder, images, asked)
        faults.of_table(table)
        own = {path.resolve() for path in (table.path, *table.files)}
        listing.foreign = [n for n in listing.foreign if (folder / n).resolve() not in own]
    if options.masks is not None:
        masks = _find_masks(images, options)
        faults.of_masks(masks)
    kept = faults.kept()
    images, headers = [images[n] for n in kept], [headers[n] for n in kept]
    resizing = None if options.written_size is None else Resizing(options.written_size, options.fit)
    feature = image_feature("image", "input", images, headers, resizing)
    found: dict[str, tuple[Feature, Column]] = {
        "image": (feature, ImageFiles([i.path for i in images], headers, resizing))
    }
    if table is not None:
        labels = table.labels(kept)
        for name in sorted({*found, *([] if masks is None else [_MASK])} & {*labels}):
            raise DataError(
                "each label must have a name of its own",
                received=f"'{name}' twice",
                mend=f"Rename that column, or leave it out with {spelt('drop', name)}",
            )
        found |= labels
    elif None not in (names := [image.class_name for image in images]):
        # The numbers of the class folders, sorted by name over all splits.
        found["label"] = column_of("label", "label", objects(names), None, [])
    if masks is not None:
        paths, of_masks = [masks.paths[n] for n in kept], [masks.headers[n] for n in kept]
        found[_MASK] = (
            image_feature(_MASK, "label", images, of_masks, resizing),
            ImageFiles(paths, of_masks, resizing, are_masks=True),
        )
    schema = Schema(tuple(feature for feature, _ in found.values()))
    if options.is_resized:
        _check_boxes(found, options)
    names = (table and table.splits(kept)) or [image.split for image in images]
    notes = (
        *faults.notes(),
        *notes_of_folders(listing, images, are_classes="label" in found and table is None),
        *notes_of_files(feature, headers, options),
        *([] if table is None else table.notes(found, options)),
        *([] if masks is None else notes_of_masks(of_masks)),
    )
    return Columns(
        "folder",
        schema,
        {name: column for name, (_, column) in found.items()},
        owners=None if table is None else table.owners(kept),
        roles=() if table is None else table.roles(),
        splits=rows_of_splits(names),
        notes=notes,
        left_out=faults.left_out(),
    )


class _Faults:
    """Everything that is wrong with images and what belongs to them: told at once."""

    def __init__(
        self,
        folder: Path,
        images: Sequence[FoundImage],
        headers: Sequence[Header | str],
        options: ImageOptions,
    ):
        self._folder, self._images, self._options = folder, images, options
        self._of_image = {
            number: header for number, header in enumerate(headers) if isinstance(header, str)
        }
        self._why = dict.fromkeys(self._of_image, "unreadable image")
        self._headers = headers
        # By what they are and what they lack.
        self._alone: dict[tuple[str, str], list[str]] = {}
        self._needed = []

    def of_table(self, table: Any) -> None:
        self._needed.append("row")
        for number, reason in table.faults(self._headers):
            self._add(number, reason, "image without a whole row")
        self._alone["row", "without an image"] = table.astray
        self._alone["row", "without whole values"] = table.bad

    def of_masks(self, masks: _Masks) -> None:
        self._needed.append("mask")
        for number, (image, mask) in enumerate(zip(self._headers, masks.headers, strict=True)):
            if reason := _mask_fault(image, mask):
                self._add(number, reason, "image without a mask that fits")
        self._alone["mask", "without an image"] = [
            f"the mask {name}, which has no image" for name in masks.alone
        ]

    def _add(self, number: int, reason: str, why: str) -> None:
        self._of_image.setdefault(number, reason)
        self._why.setdefault(number, why)

    def left_out(self) -> dict[str, int]:
        """Returns how many images, rows and masks are bad, by what is wrong with them."""
        alone = {f"{what} {why}": len(names) for (what, why), names in self._alone.items() if names}
        return {**Counter(self._why.values()), **alone}

    def kept(self) -> list[int]:
        """Returns the numbers of the good images. Raises DataError unless bad ones may be left out.

        Raises it too when there are no others.
        """
        kept = [number for number in range(len(self._images)) if number not in self._of_image]
        count = len(self._of_image) + sum(map(len, self._alone.values()))
        if count and not (self._options.skip_bad and kept):
            belongs = " and its ".join(self._needed)
            more = f", with its {belongs}, and each of those must have its image" if belongs else ""
            look = f"; {spelt('decode', False)} looks at no pixels" if self._options.decode else ""
            look += f"; name columns of words with {spelt('text')}" if "row" in self._needed else ""
            place = "" if count <= _WHOLE_PATHS else f" in {self._folder}"
            raise DataError(
                f"every image must be one that can be read{more}",
                received=f"{count:,} {'without' if belongs else 'that cannot'}{place}: "
                f"{self._listed(count)}",
                mend="Repair or remove them, or leave them out with "
                f"{spelt('skip_bad', True)}{look}",
            )
        return kept

    def notes(self) -> Iterable[str]:
        if count := len(self._of_image):
            named = self._named(whole=count < _WHOLE_PATHS)
            yield left_out(count, "image", "as bad", named, of=len(self._images))
        for (what, why), names in self._alone.items():
            if names:
                yield left_out(len(names), what, why, names)

    def _listed(self, count: int) -> str:
        named = self._named(whole=count <= _WHOLE_PATHS)
        return listed(chain(named, *self._alone.values()), _BAD_SHOWN)

    def _named(self, *, whole: bool) -> list[str]:
        return [
            f"{self._images[number].path if whole else self._images[number].name}: {reason}"
            for number, reason in sorted(self._of_image.items())
        ]


def image_feature(
    name: str,
    role: str,
    images: Sequence[FoundImage],
    headers: Sequence[Header],
    resizing: Resizing | None,
) -> Feature:
    """Returns the feature of files of images. Raises DataError for those of 8 bits and of 16."""
    dtypes = {header.dtype: number for number, header in enumerate(headers)}
    if len(dtypes) > 1:
        shown = ", ".join(f"{images[n].path} {headers[n]}" for n in sorted(dtypes.values()))
        raise DataError(
            f"all files of '{name}' must have the same number of bits a channel",
            received=shown,
            mend="Convert those of one kind first",
        )
    sizes = {(header.height, header.width) for header in headers}
    size = sizes.pop() if len(sizes) == 1 else (None, None)
    formats = {header.written_format for header in headers}
    return Feature(
        name=name,
        dtype=next(iter(dtypes)),
        shape=(
            *(size if resizing is None else resizing.size),
            max(header.channels for header in headers),
        ),
        encoding=formats.pop().lower() if len(formats) == 1 else "image",
        role=role,
        reading=Reading(
            upright=resizing is None and any(header.turned_when_read for header in headers)
        ),
    )


def _check_boxes(found: Mapping[str, tuple[Feature, Column]], options: ImageOptions) -> None:
    """Raises DataError for boxes that would not be those of the resized images."""
    for name, (feature, column) in found.items():
        if not feature.is_boxes:
            continue
        if options.fit != "stretch":
            raise refuse_boxes(name, options.fit)
        most = float(np.abs(column.flat).max(initial=0))
        if most > MOST_RELATIVE:
            raise DataError(
                f"'{name}' must be relative to height and width, 0 to 1, where images are resized, "
                "as boxes are not moved",
                received=f"a box with {most:g}, which are pixels",
                mend="Divide them by height and width, or leave the resize out",
            )


@dataclass(frozen=True)
class _Masks:
    """The mask of each image.

    Attributes:
        paths: None where there is none.
        headers: what each file is; for one that cannot be a mask, why.
        alone: the names of masks whose images are not there.
    """

    paths: list[Path | None]
    headers: list[Header | str]
    alone: list[str]


def _find_masks(images: Sequence[FoundImage], options: ImageOptions) -> _Masks:
    """Returns the masks of images: FOLDER/NAME.png, or at the image's own place in FOLDER.

    Raises:
        DataError: no such folder.
    """
    folder = Path(options.masks)
    if not folder.is_dir():
        raise DataError(
            "masks must name a folder",
            received=f"{folder}, which is none",
            mend="Check its spelling, or write the whole path",
        )
    files: dict[str, Path] = {}
    twice: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            key = _stem(path.relative_to(folder).as_posix())
            if key in files:
                twice[key] = f"has two masks, {files[key].name} and {path.name}"
            files[key] = path
    stems = [_stem(image.name) for image in images]
    bases = [stem.rpartition("/")[2] for stem in stems]
    called = Counter(bases)
    keys = [
        # The name alone is enough where one image alone is called so.
        stem if stem in files or called[base] > 1 else base
        for stem, base in zip(stems, bases, strict=True)
    ]
    paths = [files.get(key) for key in keys]
    headers: list[Header | str] = ["has no mask"] * len(paths)
    present = [number for number, path in enumerate(paths) if path is not None]
    read = read_headers([paths[number] for number in present], options, "masks")
    for number, header in zip(present, read, strict=True):
        headers[number] = header
    of_key: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        headers[number] = twice.get(key, headers[number])
        of_key.setdefault(key, []).append(number)
    for key, numbers in of_key.items():
        if key in files and len(numbers) > 1:
            names = " and ".join(images[number].name for number in numbers)
            for number in numbers:
                headers[number] = f"has a mask, {files[key].name}, that is of {names}"
    wanted = set(keys)
    alone = [path.name for key, path in files.items() if key not in wanted]
    return _Masks(paths, headers, alone)


def _stem(name: str) -> str:
    """Returns a path without its suffix, as all write it: see ``labels.plain``."""
    return plain(name.removesuffix(Path(name).suffix))


def _mask_fault(image: Header | str, mask: Header | str) -> str | None:
    """Returns what keeps a mask from belonging to its image."""
    if isinstance(mask, str):
        return mask if mask.startswith("has ") else f"its mask: {mask}"
    if isinstance(image, Header) and (image.height, image.width) != (mask.height, mask.width):
        return f"{image.width}x{image.height} pixels where its mask has {mask.width}x{mask.height}"
    return None
