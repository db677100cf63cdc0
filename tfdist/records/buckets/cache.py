"""What lies below a URL, fetched once into a folder of this machine.

Processes of one machine share it: one fetches, the others wait for it. What is kept at a time has
a bound, and what was not used for the longest time goes first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tfdist.errors import (
    DataError,
    OptionError,
    TfdistError,
    WriteError,
    cannot_write,
    read_json,
)
from tfdist.records.buckets.mirror import Mirror
from tfdist.records.buckets.store import MissingObjectError, Store
from tfdist.records.buckets.urls import WRITABLE, possible, url_of

FOLDER_VARIABLE = "TFDIST_CACHE"
BOUND_VARIABLE = "TFDIST_CACHE_GB"
_DEFAULT_GB = 50
_MANIFEST = "manifest.json"
_OFFSETS = "manifest.offsets"
_SCRATCH = ".scratch-"
# Names of folders that are made here. A user may have others in the folder of the cache.
_OWN = re.compile(rf"{re.escape(_SCRATCH)}.+|.+-[0-9a-f]{{12}}")
# Of the folder of the cache, what is no copy of anything: see ``working_place``.
_WORKING = "runs"

# Bytes and checksum of a file.
_Wanted = tuple[int, str]

# The open files whose locks say what this process uses.
_used: dict[Path, int] = {}


def local_shards(path: Any) -> Path:
    """Returns a folder of shards, or one of its splits, on this machine: a path as it is.

    While this process runs nothing is removed from there.

    Args:
        path: a path, or the URL of a folder with a manifest.json, or of that and "/SPLIT".

    Raises:
        DataError: there is no such folder, it cannot be reached, or it is not as it was written.
    """
    url = url_of(path)
    if url is None:
        return possible(path)
    base, split = url, None
    try:
        manifest = Store(base).read(_MANIFEST)
    except MissingObjectError:
        base, _, split = url.rpartition("/")
        try:
            manifest = Store(base).read(_MANIFEST)
        except DataError:
            raise MissingObjectError(
                f"{url} must be a folder of shards with a {_MANIFEST}",
                received="none there",
                mend="Check its spelling; `tfdist shard SOURCE OUT` writes shards",
            ) from None
    try:
        folder = _fetched(base, manifest, split)
    except OSError as error:  # As where another user has filled the cache.
        raise _unusable(error) from error
    return folder if split is None else folder / split


@contextlib.contextmanager
def local_tree(url: str, only: Sequence[str] | None = None) -> Iterator[Path]:
    """Gives a folder, or a file, with what lies below a URL; it is removed at the end.

    An error that names the copy while it is there names the URL instead.

    Args:
        only: names of what is wanted; None is all.
    """
    base, name = url, ""
    sizes = Store(url).sizes()
    if only is not None:
        sizes = {name: size for name, size in sizes.items() if name in only}
    if not sizes:
        base, _, name = url.rpartition("/")
        sizes = {found: size for found, size in Store(base).sizes().items() if found == name}
    if not sizes:
        raise MissingObjectError(
            f"{url} must be a folder or an object",
            received="none",
            mend="Check its spelling, and that something lies there",
        )
    with scratch_folder() as folder:
        _make_room(folder, sum(size or 0 for size in sizes.values()), url)
        Mirror(folder, base).fetch(sizes)
        copy = folder / name
        try:
            yield copy
        except TfdistError as error:
            error.args = (str(error).replace(str(copy), url),)
            raise


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Gives an empty folder of the cache, which is removed at the end."""
    with tempfile.TemporaryDirectory(dir=_made_root(), prefix=_SCRATCH) as folder:
        used = _mark_of(Path(folder))
        _use(used)  # So that no process takes it for one that nobody uses.
        try:
            yield Path(folder)
        finally:
            os.close(_used.pop(used))
            used.unlink(missing_ok=True)


def working_place(url: str, what: str) -> Path:
    """Returns where what is to go to a URL is kept until then; made when missing.

    It may hold the only copy, so the bound of the cache leaves it alone.

    Args:
        what: what the user has named the URL as, for the message.

    Raises:
        OptionError: nothing is written to such a URL.
    """
    _check_writable(url, what)
    place = _made_root() / _WORKING / _name_of(url)
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise cannot_write(place, error) from error
    return place


def upload(folder: Path, url: str) -> None:
    """Copies a folder of shards to a URL, where nothing may lie; its manifest comes last."""
    names = [path.name for path in folder.iterdir()]
    Mirror(folder, url).send(sorted(names, key=lambda name: (name == _MANIFEST, name)))


def check_free(url: str) -> None:
    """Raises DataError where something lies below a URL, OptionError for one that is only read."""
    _check_writable(url, "the place of shards")
    found = sorted(Store(url).sizes())
    if found:
        raise DataError(
            "shards must be written to a place that is free",
            received=f"{url}, where {found[0]} lies",
            mend="Choose another place",
        )


def _check_writable(url: str, what: str) -> None:
    if url.split(":")[0] not in WRITABLE:
        raise OptionError(
            f"{what} must be a folder, or a URL that begins with s3:// or gs://",
            received=url,
            mend="Name a folder, and copy it afterwards",
        )


def _files_of(manifest: bytes, split: str | None) -> dict[str, _Wanted]:
    """Returns size and checksum of each shard; of a manifest that is none, nothing: its reader
    says what is wrong with it."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        splits = read_json(manifest)["splits"]
        chosen = splits.values() if split is None or split not in splits else [splits[split]]
        shards = [shard for info in chosen for shard in info["shards"]]
        return {
            shard["file"]: (shard["bytes"], shard["checksum"])
            for shard in shards
            if _is_inside(shard["file"])
        }
    return {}


def _is_inside(name: str) -> bool:
    """Whether a name is one of a file in a folder, or in its folders."""
    path = PurePosixPath(name)
    return (
        path.as_posix() == name and not path.is_absolute() and not {".", ".."} & {*path.parts, name}
    )


def _fetched(url: str, manifest: bytes, split: str | None) -> Path:
    """Returns the folder that holds the shards of a manifest, of one split or of all.

    Other shards under the same URL have another folder: a running process may read those of before.
    """
    root = _made_root()
    name = _name_of(url)
    content = repr(sorted(_files_of(manifest, None).items()))
    folder = root / f"{name}-{_hash(content)}"
    files = _files_of(manifest, split)
    with open(root / f"{name}.lock", "ab") as lock:
        _lock(lock.fileno(), fcntl.LOCK_EX)  # Waits for whoever else fetches the same.
        _use(_mark_of(folder))
        folder.mkdir(exist_ok=True)
        os.utime(folder)
        missing = {
            file: size for file, (size, _) in files.items() if not _is_whole(folder / file, size)
        }
        _make_room(folder, sum(size for size, _ in files.values()), url)
        mirror = Mirror(folder, url)
        mirror.fetch(missing, {file: checksum for file, (_, checksum) in files.items()})
        _fetch_offsets(mirror, manifest)
        _write(folder / _MANIFEST, manifest)
        for before in root.glob(f"{name}*"):
            if before != folder and _is_own(before):
                _remove_unused(before)
    return folder


def _fetch_offsets(mirror: Mirror, manifest: bytes) -> None:
    """Fetches where each record begins, where an epoch that begins in its middle needs that.

    It is a help to reading, which does without it as well: so where it cannot be had, nothing is
    said.
    """
    path = mirror.folder / _OFFSETS
    with contextlib.suppress(DataError, WriteError, ValueError, TypeError, KeyError):
        said = read_json(manifest)
        if said["layout"] is None and said["compression"] == "none" and not path.is_file():
            mirror.fetch({_OFFSETS: None})


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _made_root() -> Path:
    """Returns the folder of the cache, made when missing.

    Raises:
        OptionError: nothing can be written there.
    """
    try:
        given = os.environ.get(FOLDER_VARIABLE)
        root = Path(given) if given else Path.home() / ".cache" / "tfdist"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(root, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable", str(root))
    except (OSError, RuntimeError) as error:  # A user without a home is a RuntimeError.
        raise _unusable(error) from error
    return root


def _unusable(error: Exception) -> OptionError:
    return OptionError(
        "the cache must have a folder of this machine that can be written",
        received=f"an error: {error}",
        mend=f"Name one with the environment's {FOLDER_VARIABLE}",
    )


def _bound() -> int:
    given = os.environ.get(BOUND_VARIABLE, str(_DEFAULT_GB))
    try:
        return int(float(given) * 1e9)
    except (ValueError, OverflowError):
        raise OptionError(
            f"{BOUND_VARIABLE} must be a number of GB",
            received=given,
            mend=f"Set {BOUND_VARIABLE}={_DEFAULT_GB}, or leave it unset",
        ) from None


def _name_of(url: str) -> str:
    """Returns a name for a folder that tells a person and us which URL it is of."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", url.split("://")[1])[-60:].strip("-.") or "data"
    return f"{plain}-{_hash(url)}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _mark_of(folder: Path) -> Path:
    """Returns the file whose lock says that a folder is in use; it is there before the folder."""
    return folder.with_name(f"{folder.name}.used")


def _is_own(folder: Path) -> bool:
    """Whether a folder was made here, and may be removed."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    return is_folder and _OWN.fullmatch(folder.name) is not None and _mark_of(folder).is_file()


def _make_room(folder: Path, wanted: int, url: str) -> None:
    """Removes what was used least lately, until what is wanted fits beside the rest.

    Raises:
        DataError: it does not fit.
    """
    bound = _bound()
    others = [path for path in folder.parent.iterdir() if path != folder and _is_own(path)]
    others.sort(key=_last_used)
    kept = sum(_bytes_in(path) for path in others)
    for oldest in others:
        if wanted + kept <= bound:
            break
        freed = _bytes_in(oldest)
        if _remove_unused(oldest):
            kept -= freed
    if wanted + kept > bound:
        in_use = f", beside {kept / 1e9:.3g} GB that are in use" if kept else ""
        raise DataError(
            f"what is fetched must fit into the cache of {bound / 1e9:g} GB",
            received=f"{wanted / 1e9:.3g} GB of {url}{in_use}",
            mend=f"Allow more with the environment's {BOUND_VARIABLE}, or mount the bucket",
        )


def _remove_unused(folder: Path) -> bool:
    """Removes a folder that no process uses, and returns whether it did."""
    try:
        descriptor = os.open(_mark_of(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # Another process has removed it meanwhile.
    except PermissionError:
        return False  # It is another user's.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # In use, or a file system without locks, where nobody can tell.
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)


def _use(path: Path) -> None:
    """Keeps a folder from being removed as long as this process runs."""
    if path not in _used:
        _used[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(_used[path], fcntl.LOCK_SH)


def _lock(descriptor: int, how: int) -> None:
    """Locks an open file, where the file system has locks: others do without."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, how)


def _last_used(folder: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # Another process removes it.
        return folder.stat().st_mtime
    return 0.0


def _bytes_in(folder: Path) -> int:
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # Another process removes it.
                found += os.stat(os.path.join(place, name)).st_size
    return found
