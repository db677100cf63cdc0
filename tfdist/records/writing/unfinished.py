"""Shards of a run that was ended before all of them were written: kept, and gone on with.

They lie beside the folder that they are to become, in OUT.unfinished, which ``unfinished.json``
marks as tfdist's: it says of which source, with which options and by which plan they are. Two
journals tell which shards are whole, and which images were looked at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfdist import __version__
from tfdist.errors import DataError, InUseError, notice, spelt
from tfdist.records.format.files import sums
from tfdist.records.format.manifest import ShardInfo
from tfdist.records.parts import Part
from tfdist.records.writing.journal import Journal, LookedAt
from tfdist.records.writing.same_run import Listing, check_same

SUFFIX = ".unfinished"
STATE = "unfinished.json"
_SHARDS = "shards"
#: A whole part that is written again lies here between the last two steps.
_REPLACED = "replaced"
_DONE = "shards.jsonl"
_LOCK = "lock"
#: Journals of what was found in files: see ``Unfinished.looked_at``.
LOOKED_AT = ("images.jsonl", "masks.jsonl")
#: All that this module puts into the folder.
_OWN = {STATE, f".{STATE}", _SHARDS, _REPLACED, _DONE, _LOCK, *LOOKED_AT}
_FORMAT = "tfdist unfinished shards 1"
# Room and connections come back, and a process may be lost (ECHILD): what was written is worth more
# than a tidy folder.
_PASSING = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.ECHILD,
)


class Unfinished:
    """What an ended run left of OUT, or what this one will leave if it is ended.

    Nothing is on the disk before something is worth keeping. Files are known by their sizes and
    times; what is in memory is part of the plan.

    Args:
        out: the folder that the shards are to become.
        names: of the source's files, or its URL; none of what is in memory.
        listing: of these files, as they are now.
        said: the options that decide what is written, as JSON.
        resume: whether to go on with what is there.
        overwrite: whether to remove what is there.
        may_begin: whether to begin where there is nothing to go on with.
        part: of OUT, which has a folder of its own; None: it is no part.

    Attributes:
        out, folder: OUT, and OUT.unfinished.
        now: what decides what is written, as JSON.
        is_resumed: whether this run goes on with another.
        notes: what there is to tell of it, a sentence each.

    Raises:
        DataError: there is nothing to go on with, or something of which the user says nothing; or
            the source is another one.
        OptionError: the options are others.
        InUseError: another process is writing there.
    """

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        listing: Listing,
        said: Mapping[str, Any],
        *,
        resume: bool,
        overwrite: bool,
        may_begin: bool = False,
        part: Part | None = None,
    ):
        self._part, self._whole_out = part, out
        self.out = out if part is None else part.path_of(out)
        self.folder = self.out.with_name(self.out.name + SUFFIX)
        self._is_begun = self.is_resumed = self.replaces = False
        self._lock: int | None = None
        self._beginning = threading.Lock()
        self.notes: list[str] = []
        # What the source is before it is read: files that change meanwhile are another source.
        self.now = {
            "format": _FORMAT,
            "written_by": f"tfdist {__version__}",
            "files": list(names),
            "listing": asdict(listing),
            "options": json.loads(json.dumps(said, default=str)),
        }
        if os.path.lexists(self.folder):
            state = self._state()
            self._take(self.folder)
            try:
                self._take_over(state, resume=resume, overwrite=overwrite)
            except BaseException:
                self._release()
                raise
        elif resume and not may_begin:
            raise DataError(
                f"{spelt('resume', True)} must find the shards of a run that was ended",
                received=f"no {self.folder}",
                mend="Leave it out, to begin",
            )
        self._done = Journal(self.folder / _DONE)

    @property
    def is_of_files(self) -> bool:
        """Whether files tell that the source is the same."""
        return bool(self.now["files"])

    def looked_at(self, what: str) -> LookedAt:
        """Returns the journal of images, or masks, that were looked at: ``images.files``."""
        name = f"{what}.jsonl"
        assert name in LOOKED_AT
        own = self._part or Part(1, 1)
        others = [part.path_of(self._whole_out) for part in own.others if part != own]
        places = [*others, *(out.with_name(out.name + SUFFIX) for out in others)]
        known = {name: value for name, value in self.now.items() if name != "plan"}
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        journals = [place / name for place in places]
        path = self.folder / name
        return LookedAt(path, self.begin, self.out, of=own, others=journals, key=key)

    def begin(self) -> None:
        """Makes the folder, if it is not there; any thread may. Raises OSError."""
        with self._beginning:
            if self._is_begun:
                return
            self.out.parent.mkdir(parents=True, exist_ok=True)
            # It gets its name with all that tells whose it is: another run may look at any time.
            begun = self.out.with_name(f".{self.folder.name}-{uuid.uuid4().hex}")
            begun.mkdir()
            try:
                self._take(begun)
                self._save(begun)
                os.rename(begun, self.folder)
            except OSError as error:
                shutil.rmtree(begun, ignore_errors=True)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._in_use() from None
                raise
            self._is_begun = True

    def whole(self, plan: str) -> dict[str, ShardInfo]:
        """Returns by file the shards that are there, each of which is read and summed.

        Args:
            plan: a text that is another one where other records go into any shard.

        Raises:
            DataError: the run that was ended had another plan.
            OSError: the folder cannot be written.
        """
        digest = hashlib.sha256(plan.encode()).hexdigest()
        if self.now.setdefault("plan", digest) != digest:
            raise DataError(
                f"{spelt('resume', True)} must find the records that the run which was ended found",
                received="others" + (", in the same files" if self.is_of_files else ""),
                mend="Other versions of packages may read them otherwise: begin anew with "
                + spelt("overwrite", True)
                if self.is_of_files
                else "Give the same in the same order, or begin anew with "
                + spelt("overwrite", True),
            )
        if not self.is_resumed:
            return {}
        found, noted = {}, {}
        for entry in self._done.entries:
            counts = entry["class_counts"]
            if counts is not None:
                counts = {int(number): count for number, count in counts.items()}
            info = ShardInfo(**{**entry, "class_counts": counts})
            noted[info.file] = info
        for info in noted.values():
            path = self.folder / _SHARDS / info.file
            with contextlib.suppress(OSError):
                if path.stat().st_size == info.bytes and sums.of(path) == info.checksum:
                    found[info.file] = info
        damaged = len(noted) - len(found)
        self.notes.append(
            f"went on with what was kept, {_counted(len(found))}"
            + (f"; {damaged:,} that had changed since are written again" if damaged else "")
        )
        return found

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Gives a folder for the shards, which becomes OUT in one step. Raises OSError."""
        self.begin()
        self._save(self.folder)
        shards = self.folder / _SHARDS
        shards.mkdir(exist_ok=True)
        yield shards
        for name in LOOKED_AT if self._part is not None else ():
            # For the parts that are still to come.
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self.folder / name, shards / name)
        if self.replaces:
            os.rename(self.out, self.folder / _REPLACED)
        os.rename(shards, self.out)
        self.remove()

    def note(self, info: ShardInfo) -> None:
        """Notes that a shard is whole; any thread may. Raises OSError."""
        self._done.add(asdict(info))

    @contextlib.contextmanager
    def kept_if_ended(self) -> Iterator[None]:
        """Keeps what was written where the run is ended, and tells so; removes it on a mistake."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            if self._is_begun:
                notice(f"{self._told()} is kept; {spelt('resume', True)} goes on")
            raise
        except DataError as error:
            if self._is_begun and getattr(error.__cause__, "errno", None) in _PASSING:
                raise DataError(
                    error.rule,
                    received=error.received,
                    mend=f"{error.mend or 'Mend that'}, and go on with {spelt('resume', True)}: "
                    f"{self._told()} is kept",
                ) from error.__cause__
            self._remove_if_own()
            raise
        except BaseException:
            self._remove_if_own()
            raise
        finally:
            self._release()

    def _remove_if_own(self) -> None:
        # What an earlier run has written is not this one's to remove.
        if self._is_begun and not self.is_resumed:
            self.remove()

    def remove(self) -> None:
        """Removes what is kept: what tfdist has put there, and the folder if that was all."""
        self._is_begun = False
        for name in (_SHARDS, _REPLACED):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            for name in _OWN - {_SHARDS, _REPLACED, STATE}:
                (self.folder / name).unlink(missing_ok=True)
            # The last of them, as it marks the folder.
            (self.folder / STATE).unlink(missing_ok=True)
            self.folder.rmdir()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _told(self) -> str:
        return f"{self.folder}, with {_counted(len(Journal(self.folder / _DONE).entries))},"

    def _take_over(self, state: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        others = sorted({path.name for path in self.folder.iterdir()} - _OWN)
        if others and (resume or overwrite):
            raise DataError(
                f"{self.folder} must hold nothing but what tfdist shard left there",
                received=others[0],
                mend="Move it to another folder",
            )
        if resume:
            check_same(self.now, state)
            self.now, self._is_begun, self.is_resumed = state, True, True
        elif overwrite:
            self.remove()
            self._release()
        else:
            raise DataError(
                "the shards of a run that was ended must be gone on with or given up",
                received=self._told().rstrip(","),
                mend=f"Go on with {spelt('resume', True)}, or begin anew with "
                + spelt("overwrite", True),
            )

    def _state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.folder / STATE).read_text())
            if state["format"] == _FORMAT and not self.folder.is_symlink():
                return state
        except (OSError, ValueError, TypeError, KeyError):
            pass
        raise DataError(
            f"{self.folder} must be what a run of tfdist shard left",
            received=f"no {STATE} of it",
            mend="Remove it, or choose another folder",
        )

    def _save(self, folder: Path) -> None:
        partial = folder / f".{STATE}"
        partial.write_text(json.dumps(self.now, indent=1) + "\n")
        os.replace(partial, folder / STATE)

    def _take(self, folder: Path) -> None:
        """Takes the lock that ends with this process, where the file system has any."""
        # A file's, as NFS locks no folder.
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise self._in_use() from None
        except OSError:
            pass

    def _in_use(self) -> InUseError:
        return InUseError(
            "a folder must be written by one process at a time",
            received=f"another that writes {self.out}",
            mend="Wait until it has ended, or choose another folder",
        )


def _counted(shards: int) -> str:
    if shards < 2:
        return "1 whole shard" if shards else "no whole shard"
    return f"{shards:,} whole shards"
