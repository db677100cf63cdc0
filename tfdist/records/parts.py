"""A part of records that several processes, which know nothing of each other, work on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import OptionError

# No scheduler has arrays as long.
_MOST = 1_000_000


@dataclass(frozen=True, order=True)
class Part:
    """One part of several.

    Attributes:
        number: 1 <= number <= parts.
        parts: how many there are.
    """

    number: int
    parts: int

    @classmethod
    def of(cls, text: str) -> Part:
        """Returns what "2/8" says. Raises OptionError where it says no part."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text) if isinstance(text, str) else None
        if found is not None:
            part = cls(int(found[1]), int(found[2]))
            if 1 <= part.number <= part.parts <= _MOST:
                return part
        raise OptionError(
            "--part must be the number of a part, from 1 on, and of all parts",
            received=repr(text),
            mend="Write --part 1/8 for the first of eight, and --part 8/8 for the last",
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def range_of(self, count: int) -> tuple[int, int]:
        """Returns (start, stop) of this part of ``count``: the parts differ by one at most."""
        return tuple(count * each // self.parts for each in (self.number - 1, self.number))

    def path_of(self, path: Path) -> Path:
        """Returns the file of this part of a file: "out.csv" is in "out.part-2-of-8.csv"."""
        return path.with_name(f"{path.stem}.part-{self.number}-of-{self.parts}{path.suffix}")

    @property
    def others(self) -> list[Part]:
        """All parts, this one too, in their order."""
        return [Part(number, self.parts) for number in range(1, self.parts + 1)]
