"""Which texts and paths name something on another machine."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from tfdist.errors import DataError

# By scheme, the package through which fsspec reads it.
PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
#: Schemes of the URLs that something is written to.
WRITABLE = ("s3", "gs", "gcs")
# Of two letters and more: one may be a drive. pathlib makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/].*)", re.DOTALL)


def url_of(path: Any) -> str | None:
    """Returns the URL that a text or a path names, without a slash at its end; None for a path.

    Raises:
        DataError: a URL of a kind that is not read, or with a password, a token or a signature.
    """
    if not isinstance(path, (str, os.PathLike)):
        return None
    text = os.fspath(path)
    found = _URL.fullmatch(text) if isinstance(text, str) else None
    if found is None or os.path.exists(text):
        return None
    scheme = found[1].lower()
    _refuse_secrets(scheme, found[2])
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise DataError(
            f"a URL must begin with one of {known}",
            received=f"{scheme}://{found[2]}",
            mend="Copy the data to such a place or into a folder, and name that",
        )
    return f"{scheme}://{found[2].rstrip('/')}"


def _refuse_secrets(scheme: str, rest: str) -> None:
    place, mark, query = rest.partition("?")
    host, slash, below = place.partition("/")
    user, _, host = host.rpartition("@")
    # Which query is a signature is for the server to know; no folder can be read through any.
    if user or "=" in query or (mark and scheme in ("http", "https")):
        raise DataError(
            "a URL must hold no password, token or signature, which files, logs and lists of "
            "processes would show",
            received=f"{'one before @' if user else 'a query'} for {host}{slash}{below}",
            mend="Fetch the data with a program that asks for it, and name the folder",
        )


def refuse_url(path: Any, what: str) -> None:
    """Raises DataError where a path is a URL.

    Args:
        what: what must lie on this machine, for the message.
    """
    if url := url_of(path):
        raise DataError(
            f"{what} must be a folder of this machine",
            received=url,
            mend="Name a folder, and copy it afterwards",
        )


_IS_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def possible(path: str | os.PathLike) -> Path:
    """Returns a path. Raises DataError where there can be no such path, or none may look there."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in _IS_NOT_THERE:
            return Path(path)
        reason = getattr(error, "strerror", None) or "a name with a NUL"
        raise DataError(
            "a path must be one that can be looked at",
            received=f"'{os.fspath(path)!s:.80}', {len(os.fspath(path))} letters: {reason}",
            mend="Choose another place or a shorter name",
        ) from None
    return Path(path)
