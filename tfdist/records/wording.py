"""Words that messages and notes of records share."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
