"""What a user should know of a folder of images that was read: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfdist.errors import spelt
from tfdist.records.format.exif import UPRIGHT
from tfdist.records.format.schema import Feature
from tfdist.records.wording import left_out, listed
from tfdist.records.writing.images.files import Header
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import FoundImage, Listing

_NAMES_SHOWN = 5
#: What is told of images whose colours have more bits than are read.
CUT = "have colours of 16 bits, of which the upper 8 are read"


def notes_of_folders(
    listing: Listing, images: Sequence[FoundImage], *, are_classes: bool
) -> Iterator[str]:
    """Yields what was skipped, and which classes are not everywhere.

    Args:
        images: those that are written.
        are_classes: whether class folders say what they are.
    """
    if listing.foreign:
        yield left_out(len(listing.foreign), "file", "as no images", listing.foreign)
    classes = {image.class_name for image in images} - {None}
    if not are_classes:
        if classes:
            yield "the names of class folders are not used"
        return
    gone = [name for name in listing.empty if name.rpartition("/")[2] not in classes]
    if gone:
        yield f"class folders without an image are no classes: {listed(gone, _NAMES_SHOWN)}"
    splits = dict.fromkeys(image.split for image in images)
    for split in splits if len(splits) > 1 else ():
        here = {image.class_name for image in images if image.split == split}
        if absent := sorted(classes - here):
            yield f"split '{split}' has no image of {listed(absent, _NAMES_SHOWN)}"


def notes_of_files(
    feature: Feature, headers: Sequence[Header], options: ImageOptions
) -> Iterator[str]:
    """Yields what becomes of files that differ from what is written or read."""
    total = len(headers)
    if options.written_size is not None:
        height, width = options.written_size
        yield (
            f"all images are rewritten in {height}x{width}, as JPEG of quality 95 where they were "
            "JPEG, else as PNG"
        )
    elif None in feature.shape and not options.is_resized:
        heights, widths = [h.height for h in headers], [h.width for h in headers]
        count = len({(header.height, header.width) for header in headers})
        yield (
            f"images have {count:,} sizes, heights {min(heights)} to {max(heights)} and widths "
            f"{min(widths)} to {max(widths)}: to be read in batches they need one, "
            f"{spelt('resize', 'HxW')}"
        )
    of = {n: sum(header.channels == n for header in headers) for n in (1, 3, 4)}
    if options.color is not None:
        pass  # All are read alike, as was asked.
    elif of[4] and of[4] < total:
        yield (
            f"{of[4]:,} of {total:,} images have an alpha channel, so all are read with 4 "
            f"channels: {spelt('color', 'rgb')} reads them without"
        )
    elif of[1] and of[3]:
        yield f"{of[1]:,} of {total:,} images are gray, and read with 3 channels as the others are"
    converted = sum(header.convert_to is not None for header in headers)
    if converted and options.written_size is None:
        kinds = sorted({f"{h.format} {h.mode}" for h in headers if h.convert_to is not None})
        yield f"{converted:,} of {total:,} images are written as PNG: {listed(kinds, _NAMES_SHOWN)}"
    if turned := sum(header.orientation != UPRIGHT for header in headers):
        yield (
            f"{turned:,} of {total:,} images say in EXIF that they are to be turned: they are read "
            "upright, and masks and boxes must be those of upright images"
        )
    if cut := sum(header.is_cut for header in headers):
        yield f"{cut:,} of {total:,} images {CUT}"
    yield from _note_of_frames(headers, "images")


def _note_of_frames(headers: Sequence[Header], what: str) -> Iterator[str]:
    if frames := sum(header.has_frames for header in headers):
        total = len(headers)
        yield f"{frames:,} of {total:,} {what} have several frames: the first one is written"


def notes_of_masks(headers: Sequence[Header]) -> Iterator[str]:
    """Yields which masks hold numbers that other programs may show as colours."""
    for mode, what in (("P", "the numbers of their colours"), ("1", "0 and 1")):
        if count := sum(header.mode == mode for header in headers):
            yield f"{count:,} of {len(headers):,} masks are written with {what} as pixels"
    yield from _note_of_frames(headers, "masks")
