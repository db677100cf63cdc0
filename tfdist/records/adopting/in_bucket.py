"""Adopting files in a bucket: they are read on this machine, and the manifest goes beside them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from tfdist.errors import DataError
from tfdist.records.buckets.cache import local_tree
from tfdist.records.buckets.store import Store
from tfdist.records.buckets.urls import refuse_url, url_of
from tfdist.records.format.manifest import MANIFEST_NAME

_Adopt = TypeVar("_Adopt", bound=Callable[..., Any])
# With nothing said but these, no record is looked at.
_OF_READING = ("resize", "fit", "color", "max_length", "progress", "tell")


def in_a_bucket_too(adopt: _Adopt) -> _Adopt:
    """Returns an ``adopt(source, out, ...)`` whose source may be the URL of a folder."""

    @functools.wraps(adopt)
    def wrapped(source: Any, out: Any = None, **options: Any) -> Any:
        given = [source] if isinstance(source, str | os.PathLike) else source
        urls = list(map(url_of, given)) if isinstance(given, Sequence) else []
        if not any(urls):
            refuse_url(out, "the place of a manifest of files that lie here")
            return adopt(source, out, **options)
        url = urls[0]
        if len(urls) > 1 or url is None or out is not None:
            raise DataError(
                "files in a bucket must be adopted as one folder, with the manifest in it",
                received=", ".join(map(str, given)) + (f", and {out}" if out is not None else ""),
                mend="Name the folder alone; to have the manifest elsewhere, copy the files here "
                "first, or mount the bucket",
            )
        said = {name for name, value in options.items() if value is not None}
        return _adopted(adopt, url, options, is_new=not said <= set(_OF_READING))

    return cast("_Adopt", wrapped)


def _adopted(adopt: Callable[..., Any], url: str, options: dict[str, Any], is_new: bool) -> Any:
    store = Store(url)
    is_known = MANIFEST_NAME in store.sizes()
    only = (MANIFEST_NAME,) if is_known and not is_new else None
    with local_tree(url, only) as folder:
        if not folder.is_dir():
            raise DataError(
                "what is adopted in a bucket must be a folder",
                received=url,
                mend="Name the folder in which its files lie",
            )
        tell = options.get("tell") or (lambda text: None)

        def tell_of_url(text: str) -> None:
            tell(text.replace(str(folder), url))

        manifest = adopt(str(folder), None, **{**options, "tell": tell_of_url})
        written = (folder / MANIFEST_NAME).read_bytes()
        if not is_known or store.read(MANIFEST_NAME) != written:
            store.write(MANIFEST_NAME, written)
    return manifest
