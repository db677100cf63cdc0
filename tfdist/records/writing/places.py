"""Sources and folders of shards behind URLs: brought to this machine, and taken there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from tfdist.errors import OptionError
from tfdist.records.buckets.urls import url_of

_Write = TypeVar("_Write", bound=Callable[..., Any])


def on_this_machine(write: _Write) -> _Write:
    """Returns a ``write(source, out, ...)`` of which both may be URLs.

    All of a source is fetched first, and what is written goes up when it is complete; its
    manifest comes last, so that nothing half-written is ever taken for a folder of shards.
    """

    @functools.wraps(write)
    def wrapped(source: Any, out: str | Path, **options: Any) -> Any:
        from_url, to_url = url_of(source), url_of(out)
        if from_url is None and to_url is None:
            return write(source, out, **options)
        from tfdist.records.buckets import cache

        if options.get("resume") or options.get("overwrite"):
            raise OptionError(
                "resume and overwrite must go with a source and a folder on this machine",
                received=from_url or to_url,
                mend="Leave it out, to begin anew",
            )
        # The copy on this machine is gone at the end, so there is nothing to go on with.
        options["resume"] = None
        with contextlib.ExitStack() as stack:
            if to_url is not None:
                cache.check_free(to_url)
                out = stack.enter_context(cache.scratch_folder()) / "shards"
            if from_url is not None:
                source = str(stack.enter_context(cache.local_tree(from_url)))
            written = write(source, out, **options)
            if to_url is not None:
                cache.upload(out, to_url)
            return written

    return cast("_Write", wrapped)
