"""Masks beside images: a second image of each record, whose pixels are numbers of classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import DataError
from tfdist.records.writing.images.files import Header, ImageFiles, read_headers
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import FoundImage

NAME = "mask"


@dataclass(frozen=True)
class FoundMasks:
    """The mask of each image.

    Attributes:
        paths: None where there is none.
        headers: what each file is; for one that cannot be a mask, why.
        alone: the names of masks whose images are not there.
    """

    paths: list[Path | None]
    headers: list[Header | str]
    alone: list[str]

    def column(self, kept: Sequence[int], **options: object) -> ImageFiles:
        paths, headers = [self.paths[n] for n in kept], [self.headers[n] for n in kept]
        return ImageFiles(paths, headers, are_masks=True, **options)


def find_masks(images: Sequence[FoundImage], options: ImageOptions) -> FoundMasks:
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
            key = path.relative_to(folder).with_suffix("").as_posix()
            if key in files:
                twice[key] = f"has two masks, {files[key].name} and {path.name}"
            files[key] = path
    stems = [image.name.removesuffix(Path(image.name).suffix) for image in images]
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
    return FoundMasks(paths, headers, alone)


def fault(image: Header | str, mask: Header | str) -> str | None:
    """Returns what keeps a mask from belonging to its image."""
    if isinstance(mask, str):
        return mask if mask.startswith("has ") else f"its mask: {mask}"
    if isinstance(image, Header) and (image.height, image.width) != (mask.height, mask.width):
        return f"{image.width}x{image.height} pixels where its mask has {mask.width}x{mask.height}"
    return None
