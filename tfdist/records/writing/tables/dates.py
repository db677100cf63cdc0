"""Dates and times, in seconds since 1970."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime

import numpy as np

#: A note of what is lost where a date becomes whole seconds.
CUT_OFF = ("has fractions of seconds, which are cut off",)
_OF_A_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_ZONE = r"Z|UTC|[+-](?:0\d|1[0-4]):?[0-5]\d"
_TIME = rf"(?:[T ]+(\d{{1,2}}):(\d\d)(?::(\d\d)(?:[.,](\d{{1,9}}))?)?\s*({_ZONE})?)?"
_NAMES_OF_MONTHS = (
    *("january", "february", "march", "april", "may", "june", "july", "august", "september"),
    *("october", "november", "december"),
)
_MONTHS = {"sept": 9} | {
    written: number
    for number, name in enumerate(_NAMES_OF_MONTHS, 1)
    for written in (name, name[:3])
}

#: The groups of an expression that are year, month and day.
Order = tuple[int, int, int]
# What is written, and where in it year, month and day are.
_FORMS = tuple(
    (re.compile(written + _TIME, re.IGNORECASE), places)
    for written, places in (
        (r"(\d{4})-(\d\d)-(\d\d)", (1, 2, 3)),
        # With digits left out it may be the number of a part, 1000-1-1.
        (r"(1[789]\d\d|2[01]\d\d)-(\d\d?)-(\d\d?)", (1, 2, 3)),
        (r"(\d{4})/(\d\d?)/(\d\d?)", (1, 2, 3)),
        (r"(\d\d?)\.(\d\d?)\.(\d{4})", (3, 2, 1)),
        (r"(\d\d?)[ -]([a-z]{3,9})[ -](\d{4})", (3, 2, 1)),
        (r"([a-z]{3,9})\.? (\d\d?),? (\d{4})", (3, 1, 2)),
    )
)
# Day and month, or month and day: only a day beyond 12 tells.
_SLASHES = re.compile(r"(\d\d?)[/-](\d\d?)[/-](\d{4})" + _TIME, re.IGNORECASE)


def order_of(parts: Iterable[Sequence[str]]) -> Order | None:
    """Returns where year, month and day are in dates such as 31/12/2024; None if none tells it.

    Args:
        parts: the dates, some at a time.
    """
    slashes = (_SLASHES.fullmatch(text) for part in parts for text in set(part))
    first = second = -1
    for found in filter(None, slashes):
        first, second = max(first, int(found[1])), max(second, int(found[2]))
    if first >= 0 and (first > 12) == (second > 12):
        return None
    return (3, 1, 2) if second > 12 else (3, 2, 1)


def dates_of(texts: Sequence[str]) -> tuple[list[int | None], tuple[str, ...]]:
    """Returns the seconds since 1970 of each text, None for what is no date; and notes of it.

    Known are ISO 8601, 2024/12/31, 31.12.2024, 31 Dec 2024 and Dec 31, 2024, each with a time or
    without; and 31/12/2024 or 12/31/2024 where the others tell which of the two it is. A time
    without a zone is taken for UTC.
    """
    return dates_in_order(texts, order_of([texts]))


def dates_in_order(
    texts: Sequence[str], order: Order | None
) -> tuple[list[int | None], tuple[str, ...]]:
    """Returns what ``dates_of`` does, where other texts, too, tell the ``order``: see there."""
    if order is None:
        why = "day and month cannot be told apart"
        return [None] * len(texts), (f"is text: of dates such as {texts[0]:.30} {why}",)
    forms = (*_FORMS, (_SLASHES, order))
    known = {text: _seconds(text, forms) for text in set(texts)}
    whole = {t: None if found is None else math.floor(found) for t, found in known.items()}
    return [whole[text] for text in texts], () if whole == known else CUT_OFF


def is_day_first(texts: Iterable[str]) -> bool | None:
    """Whether dates that ``dates_of`` has read are written as 31/12/2024, not as 12/31/2024.

    Returns:
        None where none is written as either.
    """
    slashes = (found for text in texts if (found := _SLASHES.fullmatch(text.strip())))
    told = (found for found in slashes if max(int(found[1]), int(found[2])) > 12)
    return next((int(found[1]) > 12 for found in told), None)


def year_first(text: str, *, is_day_first: bool) -> str:
    """Returns 05/06/2024 as 2024/06/05 or 2024/05/06, with its time; other text as it is."""
    stripped = text.strip()
    found = _SLASHES.fullmatch(stripped)
    if found is None:
        return text
    day, month = (1, 2) if is_day_first else (2, 1)
    # Between slashes a year may be any, see ``_FORMS``.
    return f"{found[3]}/{found[month]}/{found[day]}{stripped[found.end(3) :]}"


def whole_seconds(times: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the whole seconds since 1970 of NumPy's times, 0 where one is missing; and notes.

    Args:
        times: datetime64 [rows] in the unit of its source: another may not hold the same years.
        missing: bool [rows].
    """
    unit, count = np.datetime_data(times.dtype)
    if unit in _OF_A_SECOND and count == 1:  # NumPy's own way ends before the range does.
        seconds, rest = np.divmod(times.view(np.int64), _OF_A_SECOND[unit])
        is_cut = bool(rest[~missing].any())
    else:
        seconds, is_cut = times.astype("datetime64[s]").view(np.int64), False
    return np.where(missing, 0, seconds), CUT_OFF if is_cut else ()


def dates_as_text(seconds: np.ndarray) -> list[str]:
    """Returns seconds since 1970 as ISO 8601 has them: of midnight, the day."""
    texts = np.datetime_as_string(seconds.astype("datetime64[s]"), "s").tolist()
    return [text.removesuffix("T00:00:00") for text in texts]


def seconds_of(value: date) -> int:
    """Returns the whole seconds since 1970 of Python's date or time; UTC, if it has no zone."""
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return math.floor((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())


def _seconds(text: str, forms: Sequence[tuple[re.Pattern[str], Order]]) -> float | None:
    for form, places in forms:
        found = form.fullmatch(text)
        if found is None:
            continue
        year, month, day = (found[place] for place in places)
        if not month.isdigit():
            if month.lower() not in _MONTHS:
                return None
            month = _MONTHS[month.lower()]
        hour, minute, second, fraction, zone = found.groups()[3:]
        times = [int(part or 0) for part in (year, month, day, hour, minute, second)]
        try:
            seconds = datetime(*times, tzinfo=UTC).timestamp() - _offset(zone)
        except ValueError:
            return None
        # Any fraction: what it is exactly is cut off.
        return seconds + (0.5 if int(fraction or 0) else 0)
    return None


def _offset(zone: str | None) -> int:
    """Returns the seconds that a zone is ahead of UTC."""
    if zone is None or zone.upper() in ("Z", "UTC"):
        return 0
    seconds = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
    return -seconds if zone[0] == "-" else seconds
