"""Where sources and folders of shards are: on this machine, or behind URLs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.buckets.urls import possible, url_of


@contextlib.contextmanager
def on_this_machine(
    source: Any, out: str | Path, beside: Mapping[str, str | Path | None]
) -> Iterator[tuple[Any, Path, dict[str, str | Path | None]]]:
    """Gives a source, a folder and what lies beside the source on this machine; each may be a URL.

    All of a source is fetched first, and what is written goes up when it is complete; its
    manifest comes last, so that nothing half-written is ever taken for a folder of shards.
    """
    given = {**beside, "source": source}
    from_urls = {name: url for name, place in given.items() if (url := url_of(place))}
    to_url = url_of(out)
    for name, place in beside.items():
        if not isinstance(place, str | os.PathLike | None):
            raise OptionError(
                f"{name} must be a path", received=repr(place), mend="Give that of a file or folder"
            )
    if "source" not in from_urls and isinstance(source, str | os.PathLike):
        possible(source)
    if to_url is None:
        possible(out)
    if not from_urls and to_url is None:
        yield source, Path(out), dict(beside)
        return
    from tfdist.records.buckets import cache

    with contextlib.ExitStack() as stack:
        if to_url is not None:
            cache.check_free(to_url)
            out = stack.enter_context(cache.scratch_folder()) / "shards"
        whole = from_urls.pop("source", None)
        if whole is not None:
            given["source"] = str(stack.enter_context(cache.local_tree(whole)))
        for name, url in from_urls.items():
            if whole is not None and url.startswith(f"{whole}/"):
                given[name] = os.path.join(given["source"], url[len(whole) + 1 :])
            else:
                given[name] = str(stack.enter_context(cache.local_tree(url)))
        source = given.pop("source")
        yield source, Path(out), given
        if to_url is not None:
            cache.upload(Path(out), to_url)


def check_kept(out: str | Path, *, is_asked: bool) -> bool:
    """Returns whether what is written is kept where it is ended: not of a place behind a URL.

    Args:
        is_asked: whether the user says what needs it.
    """
    url = url_of(out)
    if url is not None and is_asked:
        raise OptionError(
            "resume, overwrite and part must go with a folder on this machine",
            received=url,
            mend="Leave it out, to begin anew; to be able to go on, or to write parts, write into "
            "a folder, and copy it to the bucket afterwards",
        )
    return url is None


def check_free(out: Path, source: Any, *, overwrite: bool) -> None:
    """Raises DataError unless a folder is new or empty, and beside its source."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            "shards must be written to a new or empty folder",
            received=f"{out}, which {'holds something' if out.is_dir() else 'is a file'}",
            mend=f"Remove it yourself, or choose another folder: {spelt('overwrite', True)} gives "
            "up what a run that was ended has kept, and never what is finished"
            if overwrite
            else "Remove it, or choose another folder",
        )
    if isinstance(source, str | os.PathLike):
        check_apart(out, Path(source))


def check_apart(out: Path, source: Path) -> None:
    """Raises DataError for a folder inside of its source."""
    if source.resolve() in out.parents:
        raise DataError(
            "shards must not be written into their own source",
            received=f"{out}, inside of {source}",
            mend="Choose a folder beside it",
        )
