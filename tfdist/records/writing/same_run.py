"""What decides what a run writes, and whether another one is the same in that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.buckets.urls import url_of
from tfdist.records.writing.listing import Listing, listing_of
from tfdist.records.writing.raw_sources import DIGITS

# Who goes on, or writes another part, may give others of these.
_MAY_DIFFER = ("source", "out", "workers", "resume", "overwrite", "part", "progress", "opened")


def said_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of the arguments of ``writer.write`` those that decide what is written, as JSON."""
    return {name: _as_json(value) for name, value in given.items() if name not in _MAY_DIFFER}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def known_by(
    source: Any, here: Any, beside: Mapping[str | Path | None, str | Path | None]
) -> tuple[list[str], Listing]:
    """Returns the names of the files that a source is in, and how they lie there.

    Args:
        here: where the source is on this machine: a copy, where it was fetched.
        beside: further files of it -> where they are on this machine; None for none.
    """
    if not isinstance(source, (str, os.PathLike)) or source == DIGITS:
        return [], listing_of([])
    places = {source: here} | {path: copy for path, copy in beside.items() if path is not None}
    urls = {path: url_of(path) for path in places}
    listing = listing_of(places.values(), are_copies=any(urls.values()))
    return [url or os.path.abspath(path) for path, url in urls.items()], listing


def check_same(now: Mapping[str, Any], was: Mapping[str, Any]) -> None:
    """Raises an error unless a run may go on with another, see ``Unfinished.said``.

    Raises:
        DataError: that was of another version, or its source is another one now.
        OptionError: it had other options.
    """
    anew = f"Give it the same, or begin anew with {spelt('overwrite', True)}"
    if was["written_by"] != now["written_by"]:
        raise DataError(
            f"{spelt('resume', True)} must go on with the version that began",
            received=f"{now['written_by']} where {was['written_by']} began",
            mend=anew,
        )
    asked, had = now["options"], was["options"]
    other = [name for name in asked if asked[name] != had.get(name)]
    if other:
        shown = ", ".join(f"{name} {_shown(asked[name])}" for name in other)
        began = ", ".join(_shown(had.get(name)) for name in other)
        raise OptionError(
            f"{spelt('resume', True)} must have the options of the run that was ended",
            received=f"{shown} where it had {began}",
            mend=anew,
        )
    found, listed = Listing(**now["listing"]), Listing(**was["listing"])
    if now["files"] != was["files"]:
        received = f"{_named(now['files'])} where it had {_named(was['files'])}"
    elif found != listed:
        same = (found.files, found.bytes) == (listed.files, listed.bytes)
        received = "files of other sizes or times" if same else f"{found} where there were {listed}"
    else:
        return
    raise DataError(
        f"{spelt('resume', True)} must find the source as it was when the run began",
        received=received,
        mend=f"Begin anew with {spelt('overwrite', True)}",
    )


def _named(files: Sequence[str]) -> str:
    return ", ".join(files) or "data in memory"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
