"""Objects below a URL, through fsspec: credentials are where its packages look for them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.errors import (
    DataError,
    EngineMissingError,
    TfdistError,
    cannot_write,
    first_line,
    package_missing,
)
from tfdist.records.buckets.urls import PACKAGES

# What tfdist's extra "buckets" installs; the others bring much that few need.
_IN_EXTRA = ("s3fs", "aiohttp")
_PIECE_BYTES = 8 << 20
# How often and how long a request is tried before it is given up; of S3, whose default is longer
# than anyone waits.
_OF_S3 = {
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"max_attempts": 4, "mode": "standard"},
    }
}
# gcsfs logs what it raises with its traceback, and each place that is not there. Where nobody
# listens, Python would show that; a user's own logging gets it as before.
_OF_GCS = logging.NullHandler()


class MissingObjectError(DataError):
    """There is no such object."""


class Store:
    """What lies below a URL; names are relative to it.

    Args:
        url: as ``urls.url_of`` returns it.

    Raises:
        EngineMissingError: the package that reads such a URL is missing.
        DataError: any request that fails, of every method: it names the object.
    """

    def __init__(self, url: str):
        self.url = url
        scheme = url.split(":")[0]
        try:
            import fsspec

            options = _OF_S3 if scheme == "s3" else {}
            if scheme in ("gs", "gcs"):
                logging.getLogger("gcsfs").addHandler(_OF_GCS)
            # A listing kept from before would hide what is new.
            self._files, self._root = fsspec.url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            raise _missing(scheme, error) from error

    def read(self, name: str) -> bytes:
        with self._told(name):
            return self._files.cat_file(self._path(name))

    def sizes(self) -> dict[str, int | None]:
        """Returns the bytes of every object below the URL, by name; None where no one tells."""
        with self._told(""):
            found = self._files.find(self._root, detail=True)
        start = len(self._root.rstrip("/")) + 1
        # A root that is a file is found too, by some packages without its size.
        below = {path[start:]: info["size"] for path, info in found.items() if path[start:]}
        objects = {name: size for name, size in below.items() if name[-1] != "/"}
        return {name: self._size(name) if size is None else size for name, size in objects.items()}

    def _size(self, name: str) -> int | None:
        """Asks for one object, since pages of https:// list none of the sizes."""
        with self._told(name):
            return self._files.info(self._path(name))["size"]

    def fetch(self, name: str, path: Path, progress: Callable[[int], None]) -> None:
        """Copies an object into a file.

        Args:
            progress: called with the number of bytes just written.

        Raises:
            WriteError: the file cannot be written.
        """
        with self._told(name):
            remote = self._files.open(self._path(name), "rb", cache_type="readahead")

        def pieces() -> Iterator[bytes]:
            while True:
                with self._told(name):
                    piece = remote.read(_PIECE_BYTES)
                if not piece:
                    return
                yield piece

        with remote:
            try:
                with open(path, "wb") as file:
                    for piece in pieces():
                        file.write(piece)
                        progress(len(piece))
            except OSError as error:  # Those of the object are DataErrors.
                raise cannot_write(path.parent, error) from error

    def put(self, path: Path, name: str) -> None:
        """Copies a file into an object."""
        with self._told(name):
            self._files.put_file(str(path), self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """Makes an object, or replaces it as a whole."""
        with self._told(name):
            self._files.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        """Removes one object, if it is there."""
        with contextlib.suppress(MissingObjectError), self._told(name):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Turns whatever a package raises into one line that names the object."""
        place = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except FileNotFoundError:
            raise MissingObjectError(
                f"{place} must be an object that can be read",
                received="none",
                mend="Check its spelling, and that it lies there",
            ) from None
        except TfdistError:
            raise
        except Exception as error:  # Each package has errors of its own.
            raise DataError(
                f"{place} must be within reach",
                received=f"an error: {first_line(error).strip()}",
                mend="Check the URL, the network, and your credentials and rights there",
            ) from error


def _missing(scheme: str, error: ImportError) -> EngineMissingError:
    package, purpose = PACKAGES[scheme], f"{scheme}:// URLs"
    if package in _IN_EXTRA:
        return package_missing(package, purpose, "buckets", error)
    return EngineMissingError(
        f"{package} must be installed for {purpose}",
        received=f"an error: {error}",
        mend=f"Run pip install 'tfdist[buckets]' {package}",
    )
