"""Words that messages and notes of records share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfdist.errors import DataError

#: What to do about data without a record, and about parts that do not belong together.
NO_RECORD = "Look for a filter, a slice or a path that leaves none"
EQUAL_ROWS = "Give as many rows of each: row n of every part is record n"
# Not within a value that is shown.
_RECORD = re.compile(r"""'[^']*'|"[^"]*"|\brecord (\d+)""")


def no_record(received: str, what: str = "data") -> DataError:
    """Returns the error for what has no record."""
    return DataError(f"{what} must have at least one record", received=received, mend=NO_RECORD)


@contextlib.contextmanager
def told_as(rule: str, mend: str, *errors: type[Exception]) -> Iterator[None]:
    """Encloses what reads a file. Raises DataError for one of the errors."""
    try:
        yield
    except errors as error:
        raise DataError(rule, received=f"an error: {error}", mend=mend) from None


def check_unmasked(values: Any, what: str) -> None:
    """Raises DataError for a masked array where values are missing; ``what`` is its name."""
    import numpy as np  # Not for `--help`, whose verbs import this module.

    if np.ma.is_masked(values):
        raise DataError(
            "every value must be present",
            received=f"{what} some values of which are masked",
            mend="Fill them in, as by array.filled(0), or leave those records out",
        )


def placed(error: DataError, place_of: Callable[[int], str], source: str = "") -> DataError:
    """Returns an error that counts records of a part with the places that they have in the whole.

    Args:
        place_of: called with the number of a record, returns its place, such as "line 7".
        source: what begins the rule, such as the name of a file and a colon.
    """
    received = _RECORD.sub(
        lambda found: place_of(int(found[1])) if found[1] else found[0], str(error.received or "")
    )
    return DataError(source + error.rule, received=received, mend=error.mend)


def listed(names: Iterable[str], most: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def left_out(
    count: int, what: str, why: str, names: Iterable[str], *, of: int | None = None, most: int = 5
) -> str:
    """Returns what is told of parts of a source that are not written.

    Args:
        what: one of them, such as "file".
        why: how they are left out, such as "as bad".
        names: which they are; the first ``most`` are told.
        of: how many there are in all, where that is to be told.
    """
    counted = f"{count:,}" if of is None else f"{count:,} of {of:,}"
    plural = "" if (count if of is None else of) == 1 else "s"
    be = "is" if count == 1 else "are"
    return f"{counted} {what}{plural} {be} left out {why}: {listed(names, most)}"
