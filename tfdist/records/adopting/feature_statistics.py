"""What the records that others wrote have under one key, gathered record by record."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tfdist.records.format.examples import Values, count, floats, integers, strings
from tfdist.records.format.exif import UPRIGHT, is_sideways, orientation_of_jpeg

# Numbers that are no class ids differ nearly all: counting them would need their memory.
_MOST_CLASSES = 100_000
_MOST_SIZES = 2
_SHOWN_LETTERS = 24
_SHOWN_VALUES = 4


@dataclass
class Found:
    """The values of one key in some records.

    Attributes:
        in_list: whether they are steps of feature lists.
        records: how many records have a value.
        kinds: of the lists: "bytes", "float", "int64"; "none" for an empty step.
        fewest, most: values, or steps, of the records that have some.
        step: values of each step; -1 where they differ; 0 of what is no feature list.
        class_counts: of the whole numbers of records that have one each; None when they are many.
        heads: of the images, how many of each: of two sizes at most, and then without a size.
        images: how many values are JPEG or PNG images.
        texts: how many values are text.
        values: how many values there are.
        other: an image format that is not read, which was found.
        unfinite: how many records have a NaN or an infinite value.
        no_weight: (which of the records, its value) of the first that has one number which is below
            0, NaN or infinite; None where none has.
        no_image: likewise, which has the first bytes that are no JPEG or PNG image.
        binary: the number of bytes of all values; -1 where they differ.
        example: the first record's values, as they are shown.
    """

    in_list: bool = False
    records: int = 0
    kinds: set[str] = field(default_factory=set)
    fewest: int = 0
    most: int = 0
    step: int = 0
    class_counts: Counter[int] | None = field(default_factory=Counter)
    heads: Counter[Head] = field(default_factory=Counter)
    images: int = 0
    texts: int = 0
    values: int = 0
    other: str | None = None
    unfinite: int = 0
    no_weight: tuple[int, float] | None = None
    no_image: int | None = None
    binary: int = 0
    example: str = ""

    def take(self, record: bytes, values: Values) -> None:
        """Takes the list of one record."""
        self.kinds.add(values.kind)
        if values.kind == "bytes":
            places = list(strings(record, values))
            self._take_length(len(places))
            for start, stop in places:
                self._take_string(record, start, stop)
        else:
            length = count(record, values)
            self._take_length(length)
            if values.kind == "int64" and length == 1:
                number = integers(record, values)[0]
                self._take_number(number)
                if self.class_counts is not None:
                    self.class_counts[number] += 1
                    if len(self.class_counts) > _MOST_CLASSES:
                        self.class_counts = None
            elif values.kind == "float":
                numbers = floats(record, values)
                self.unfinite += not all(map(math.isfinite, numbers))
                if length == 1:
                    self._take_number(numbers[0])
        if self.records == 1:
            self.example = _shown(record, values)

    def _take_number(self, number: float) -> None:
        if self.no_weight is None and not 0 <= number < math.inf:
            self.no_weight = self.records - 1, number

    def take_steps(self, record: bytes, steps: list[Values]) -> None:
        """Takes the feature list of one record."""
        self._take_length(len(steps))
        for step in steps:
            self.kinds.add(step.kind)
            size = 0 if step.kind == "none" else count(record, step)
            self.step = size if self.step in (0, size) and size else -1
            if step.kind == "bytes":
                for start, stop in strings(record, step):
                    self._take_string(record, start, stop)
        if self.records == 1 and steps and steps[0].kind != "none":
            self.example = f"{_shown(record, steps[0])}, …"

    def add(self, other: Found) -> None:
        """Takes what was found in other records, which come behind."""
        if not other.records:
            return
        self.fewest = min(self.fewest, other.fewest) if self.records else other.fewest
        self.most = max(self.most, other.most)
        if other.step:  # Else all of its lists are empty.
            self.step = other.step if self.step in (0, other.step) else -1
        self.binary = other.binary if not self.values or self.binary == other.binary else -1
        self.example = self.example or other.example
        self.records += other.records
        self.kinds |= other.kinds
        if None in (self.class_counts, other.class_counts):
            self.class_counts = None
        else:
            self.class_counts.update(other.class_counts)
        for head, number in other.heads.items():
            self._take_head(head, number)
        self.unfinite += other.unfinite
        self.images += other.images
        self.texts += other.texts
        self.values += other.values
        self.other = self.other or other.other

    def _take_length(self, length: int) -> None:
        self.fewest = min(self.fewest, length) if self.records else length
        self.most = max(self.most, length)
        self.records += 1

    def _take_string(self, record: bytes, start: int, stop: int) -> None:
        self.binary = stop - start if not self.values or self.binary == stop - start else -1
        self.values += 1
        head = head_of(record, start, stop)
        if head is not None:
            self.images += 1
            self._take_head(head, 1)
            return
        if self.no_image is None:
            self.no_image = self.records - 1
        if self.texts == self.values - 1:
            self.texts += _is_text(record[start:stop])
            if self.texts < self.values:
                self.other = self.other or other_format(record[start : start + 12])

    def _take_head(self, head: Head, number: int) -> None:
        if head not in self.heads and len({h[1:3] for h in self.heads}) >= _MOST_SIZES:
            head = head._replace(height=0, width=0)
        self.heads[head] += number


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or all(letter.isprintable() or letter.isspace() for letter in text)


def _shown(record: bytes, values: Values) -> str:
    if values.kind == "bytes":
        start, stop = next(strings(record, values), (0, 0))
        head = head_of(record, start, stop)
        if head is not None:
            return f"{head.format} {head.height}x{head.width}x{head.channels}"
        data = record[start : min(stop, start + 4 * _SHOWN_LETTERS)]
        text = data.decode(errors="ignore")
        # Cut within a letter, it may be up to three bytes short.
        if len(text.encode()) < len(data) - 3 or not _is_text(text.encode()):
            return f"{stop - start} bytes"
        text = " ".join(text.split())
        return f"'{text[:_SHOWN_LETTERS]}{'…' if len(text) > _SHOWN_LETTERS else ''}'"
    are_whole = values.kind == "int64"
    numbers = integers(record, values) if are_whole else floats(record, values)
    shown = ", ".join(map(str if are_whole else "{:g}".format, numbers[:_SHOWN_VALUES]))
    return shown if len(numbers) <= _SHOWN_VALUES else f"{shown}, …"


# The size of a JPEG or PNG image, read from the first bytes of its file.
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_OTHERS = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
# Start of frame, of every way to code it; C4, C8 and CC are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset([0x01, *range(0xD0, 0xD9)])


class Head(NamedTuple):
    """Format, "jpeg" or "png", and size of an image; channels 1 to 4, bits of a value.

    A JPEG image that is turned, as its EXIF says, has the size of the upright one.
    """

    format: str
    height: int
    width: int
    channels: int
    bits: int
    is_turned: bool = False


def head_of(data: bytes, start: int = 0, stop: int | None = None) -> Head | None:
    """Returns what the head of an image says; None where it is no JPEG or PNG, or a broken one."""
    stop = len(data) if stop is None else stop
    first = data[start : start + 8]
    try:
        if first[:3] == b"\xff\xd8\xff":
            return _upright(_jpeg(data, start + 2, stop), orientation_of_jpeg(data, start, stop))
        if first == _PNG and stop - start >= 33:
            width, height, bits, color = struct.unpack_from(">IIBB", data, start + 16)
            return Head("png", height, width, _PNG_CHANNELS[color], bits)
    except (IndexError, KeyError, struct.error):
        pass
    return None


def other_format(data: bytes) -> str | None:
    """Returns the name of an image format that is not read here."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for magic, name in _OTHERS.items() if data.startswith(magic)), None)


def _upright(head: Head | None, orientation: int) -> Head | None:
    if head is None or orientation == UPRIGHT:
        return head
    size = (head.height, head.width)
    height, width = size[::-1] if is_sideways(orientation) else size
    return head._replace(height=height, width=width, is_turned=True)


def _jpeg(data: bytes, at: int, stop: int) -> Head | None:
    while at + 9 < stop:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF or marker in _WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in _FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            return Head("jpeg", height, width, channels, bits)
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None
