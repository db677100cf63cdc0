"""What a user says of a folder of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import OptionError, spelt
from tfdist.records.format.readings import check_choices, parse_size
from tfdist.records.writing.journal import LookedAt


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What is said of the images of a folder.

    Attributes:
        labels: a table, in a file, that has a row for each image; None for class folders.
        masks: a folder of masks, which are called as their images are.
        skip_bad: whether images that cannot be read, or lack a row or a mask, are left out.
        written_size: height and width that images are written in; None keeps their bytes.
        is_resized: whether they are read in one size, so that they need not have one.
        fit: how they get to ``written_size``: see ``schema.Reading``.
        color: what they are read as, "rgb" or "gray"; None: as they are.
        decode: whether every image is decoded, to see that it can be.
        workers: number of threads that look at the files.
        looked_at: returns the journal of "images" or "masks" that were looked at; None where
            nothing is noted.
    """

    labels: str | Path | None = None
    masks: str | Path | None = None
    skip_bad: bool = False
    written_size: tuple[int, int] | None = None
    is_resized: bool = False
    fit: str = "stretch"
    color: str | None = None
    decode: bool = True
    workers: int = 1
    looked_at: Callable[[str], LookedAt | None] = lambda what: None

    def check_unused(self, source: object) -> None:
        """Raises OptionError when something is said that only a folder of images can have."""
        said = {
            "labels": self.labels is not None,
            "masks": self.masks is not None,
            "write_resized": self.written_size is not None,
        }
        named = [name for name, is_said in said.items() if is_said]
        rule = f"{', '.join(named)} must go with a folder of images"
        if not named:
            others = "a folder of images or texts, a table or a .tar file"
            rule = f"{spelt('skip_bad', True)} must go with {others}"
        if named or self.skip_bad:
            raise OptionError(rule, received=f"{source!r:.60}", mend="Leave it out")


def image_options(
    *,
    resize: str | tuple[int, int] | None,
    fit: str | None,
    color: str | None,
    write_resized: bool,
    **others: object,
) -> ImageOptions:
    """Returns what ``writer.write`` was given, before anything is read.

    Raises:
        OptionError: an unknown choice, or options that cannot hold together.
    """
    size = None if resize is None else parse_size(resize)
    check_choices(fit, color)
    for given, is_said in (
        (spelt("fit", fit, flag=f"--{fit}"), fit is not None),
        (spelt("write_resized", True), write_resized),
    ):
        if is_said and resize is None:
            raise OptionError(
                f"{given} must go with {spelt('resize')}, which says the size",
                received="no size",
                mend=f"Say it, such as {spelt('resize', '224x224')}, or leave the other out",
            )
    return ImageOptions(
        written_size=size if write_resized else None,
        is_resized=resize is not None,
        fit=fit or "stretch",
        color=color,
        **others,
    )
