"""What decides what a run writes, and whether another one is the same in that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.writing.listing import Listing


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
