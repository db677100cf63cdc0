"""The output of a training in a bucket: written on this machine, and taken there as it gets whole.

The objects are called as the files of a run's folder. A checkpoint goes up before the list that
names it, and what a list does not name any more goes after that. What replaces an earlier training
goes up beside it first:

    .tfdist-new-ID/    the new one; the mark still says that the earlier one counts
    .tfdist-run        the mark, one object: written anew, it says that what is in .tfdist-new-ID
                       counts; the earlier one's objects are removed, and the new ones copied

Whatever is killed, what the mark says to count is whole.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tfdist.errors import InUseError, OptionError, TfdistError, WriteError, read_json
from tfdist.records.buckets import cache
from tfdist.records.buckets.mirror import Mirror, finish
from tfdist.records.buckets.store import MissingObjectError
from tfdist.runs.folder import CHECKPOINTS, FILES, MARK
from tfdist.runs.settings import Start
from tfdist.traces import places
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine.failure_notices import ToldOnce
from tfdist.training.engine.folder_lock import FolderLock

_STAGE = ".tfdist-new-"
_LIST = f"{CHECKPOINTS}/{checkpoint_files.LIST}"
# What a resumed training reads, or may leave as it is.
_TO_GO_ON = ("config.json", "history.csv", "resources.csv", "best.keras")
_BEAT_S = 60.0
# A mark that has not been written for so long is that of a training which was lost.
_LOST_AFTER_S = 5 * _BEAT_S


@dataclass(frozen=True)
class _Mark:
    """Whose the place is.

    Attributes:
        owner: of the training that writes or wrote there.
        machine: tells machines, and folders of caches, apart; a lock tells trainings of one.
        beat: when the owner wrote it last, in seconds since 1970.
        running: whether the owner has not ended, as far as it could tell.
        stage: where the training that counts is; "" is the place itself.
    """

    owner: str
    process: int
    host: str
    machine: str
    since: str
    beat: float
    running: bool
    stage: str = ""


class Uploads:
    """Takes what a training has written to a URL, beside the training.

    Args:
        url: s3:// or gs://.
        folder: the training's, on this machine.
        tell: is told in one line when something cannot be taken there.
    """

    def __init__(self, url: str, folder: Path, tell: Callable[[str], None]):
        self.url, self.folder = url, folder
        self._mirror = Mirror(folder, url)
        self._failures = ToldOnce(tell)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._mark = _Mark(
            owner=uuid.uuid4().hex,
            process=os.getpid(),
            host=socket.gethostname(),
            machine=_machine(folder.parents[1]),
            since=since,
            beat=time.time(),
            running=True,
        )
        self._own_stage = f"{_STAGE}{self._mark.owner[:8]}"
        self._replaces = False
        self._is_lost = False
        self._marking = threading.Lock()
        self._is_over = False
        self._wake, self._beaten = threading.Event(), threading.Event()
        self._sender = threading.Thread(target=self._sends, name="tfdist uploads", daemon=True)
        # What is large takes longer to send than a mark may be silent.
        self._beater = threading.Thread(target=self._beats, name="tfdist beats", daemon=True)

    # Begin and end ------------------------------------------------------------------------------

    def begin(self, start: Start) -> None:
        """Takes the place, and fetches what a resumed training goes on from.

        Raises:
            OptionError: something lies there, and neither option was given, or it is no training.
            InUseError: another training writes there.
            DataError: it cannot be reached.
        """
        sizes = self._mirror.look()
        before = self._read_mark()
        if sizes and before is None:
            raise OptionError(
                "--output must be a new place, or one of an earlier training",
                received=f"{self.url}, which holds something else",
                mend="Choose another place",
            )
        if before is not None:
            self._check_left(before)
            stage = before.stage and f"{before.stage}/"
            earlier = {name for name in sizes if _is_ours(name.removeprefix(stage))}
            if earlier and not (start.resume or start.overwrite):
                raise OptionError(
                    "--output must be a new place",
                    received=f"{self.url}, where a training lies",
                    mend="Add --resume to go on, --overwrite to start anew, or choose another",
                )
            self._replaces = start.overwrite and bool(earlier)
            self._mark = replace(self._mark, stage=before.stage)
            if start.resume:
                self._fetch(sizes)
        self._write_mark()
        self._check_mine()
        if not self._mark.stage:  # Of one that was killed before an epoch had ended.
            self._remove(_is_staged)
        self._sender.start()
        self._beater.start()

    def note(self, event: dict[str, Any]) -> None:
        """Is called with all events of ranks."""
        if event["event"] in ("written", "epoch"):
            self._wake.set()

    def end(self) -> None:
        """Takes there what is left, and gives the place back.

        Raises:
            WriteError: not all could be taken there; it is kept on this machine.
        """
        self._is_over = True
        self._wake.set()
        try:
            self._sender.join()
            finish(
                lambda: (self._send_whole(), self._give_back()),
                self.url,
                "of the training",
                f"It is kept in {self.folder}: copy it, or go on with that as --output and "
                "--resume",
            )
        finally:
            self._beaten.set()
            self._beater.join()  # Written late, its mark would be over that of the next one.

    def _sends(self) -> None:
        while self._wake.wait():
            self._wake.clear()  # First: what is set from here on is seen.
            if self._is_over or self._is_lost:
                return
            self._try(self._send_whole)

    def _beats(self) -> None:
        while not (self._beaten.wait(_BEAT_S) or self._is_lost):
            self._try(self._beat)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failures.worked()
        except (TfdistError, OSError) as error:
            again = "" if self._is_lost else ", and is taken there later if that can be"
            self._failures.failed(
                f"the training goes on, and is kept in {self.folder}{again}: {error}"
            )

    # Whose the place is -------------------------------------------------------------------------

    def _read_mark(self) -> _Mark | None:
        try:
            text = self._mirror.store.read(MARK)
        except MissingObjectError:
            return None
        try:
            mark = _Mark(**read_json(text))
            is_known = mark.stage == "" or (mark.stage.startswith(_STAGE) and "/" not in mark.stage)
            return mark if is_known and mark.beat >= 0 else None
        except (ValueError, TypeError, AttributeError):
            return None

    def _write_mark(self, **changes: Any) -> None:
        with self._marking:
            self._mark = replace(self._mark, beat=time.time(), **changes)
            self._mirror.store.write(MARK, (json.dumps(asdict(self._mark)) + "\n").encode())

    def _beat(self) -> None:
        self._check_mine()
        self._write_mark()

    def _check_left(self, mark: _Mark) -> None:
        # Of this machine, a lock has shown that it has ended.
        silent_s = time.time() - mark.beat
        if mark.running and mark.machine != self._mark.machine and silent_s < _LOST_AFTER_S:
            raise InUseError(
                "a place must be written by one training at a time",
                received=f"{self.url} in use by process {mark.process} on {mark.host} since "
                f"{mark.since}",
                mend="Wait until that has ended, or, should it have been killed, "
                f"{_LOST_AFTER_S - silent_s:.0f} seconds; or choose another place",
            )

    def _check_mine(self) -> None:
        now = self._read_mark()
        if now is None or now.owner != self._mark.owner:
            self._is_lost = True
            who = f"process {now.process} on {now.host}" if now else "no training that is known"
            raise InUseError(
                "a place must be written by one training at a time",
                received=f"{self.url} taken by {who}",
                mend="Train again, with another --output",
            )

    def _give_back(self) -> None:
        self._beaten.set()
        self._beater.join()
        if self._mirror.there <= {MARK}:  # It came to nothing.
            self._mirror.store.remove(MARK)
        else:
            self._write_mark(running=False)

    # What goes there, and comes from there ------------------------------------------------------

    def _fetch(self, sizes: Mapping[str, int | None]) -> None:
        """Fetches what counts; of a stage all of it, as it is to be copied."""
        stage = self._mark.stage
        start = f"{stage}/" if stage else ""
        known = {
            name.removeprefix(start): size for name, size in sizes.items() if name.startswith(start)
        }
        kept = checkpoint_files.whole(
            name.removeprefix(f"{CHECKPOINTS}/") for name in known if name.startswith(CHECKPOINTS)
        )
        wanted = [name for name in (FILES if stage else _TO_GO_ON) if name in known]
        if stage:
            wanted += filter(places.is_ours, known)
        wanted += [f"{CHECKPOINTS}/{part}" for parts in kept.values() for part in parts]
        self._mirror.fetch({name: known[name] for name in wanted}, below=start)

    def _send_whole(self) -> None:
        self._check_mine()
        with self._snapshot() as place:
            names = _in_order(place)
            has_epoch = (place / "history.csv").is_file() and _LIST in names
            if self._replaces:
                if not (has_epoch or "model.keras" in names):
                    return  # The earlier one stands until an epoch has ended.
                self._send(place, names, f"{self._own_stage}/")
                self._write_mark(stage=self._own_stage)
                self._replaces = False
            if self._mark.stage:
                self._mirror.remove([_LIST])
                self._remove(_is_ours)
                self._send(place, names, "")
                self._write_mark(stage="")
                self._remove(_is_staged)
            elif _LIST in names or "history.csv" in names:
                self._send(place, names, "")

    def _send(self, place: Path, names: list[str], start: str) -> None:
        self._mirror.send(names, below=start, of=place)
        kept = f"{start}{CHECKPOINTS}/"
        gone = self._mirror.there - {start + name for name in names}
        ours = [n for n in gone if n.startswith(kept) and _is_ours(n.removeprefix(start))]
        self._mirror.remove(checkpoint_files.index_first(ours))

    def _remove(self, which: Callable[[str], bool]) -> None:
        self._mirror.remove(filter(which, sorted(self._mirror.there)))

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Path]:
        """Gives a folder with what is whole now; the training goes on replacing and removing."""
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix="up-") as name:
            place = Path(name)
            kept = place / CHECKPOINTS
            kept.mkdir()
            for file in (*FILES, *places.files_in(self.folder)):
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                _link(self.folder / file, place / file)
            found = self.folder / CHECKPOINTS
            for path in list(found.iterdir()) if found.is_dir() else ():
                if checkpoint_files.is_part(path.name):
                    _link(path, kept / path.name)
            whole = checkpoint_files.whole(path.name for path in kept.iterdir())
            parts = {part for parts in whole.values() for part in parts}
            for path in list(kept.iterdir()):
                if path.name not in parts:
                    path.unlink()
            checkpoint_files.mend_list(kept)
            yield place


@contextlib.contextmanager
def uploading(url: str, start: Start, tell: Callable[[str], None]) -> Iterator[Uploads]:
    """Encloses a training whose output is a URL.

    What is on this machine stays until this process ends; for good where it could not be taken
    there.

    Raises:
        WriteError: the training is well, and not all of it could be taken there.
    """
    place = cache.working_place(url, "--output")
    lock = FolderLock(place / checkpoint_files.LOCK)
    try:
        work = Path(tempfile.mkdtemp(dir=place))
        folder = work / "run"
        folder.mkdir()
        uploads = Uploads(url, folder, tell)
        try:
            uploads.begin(start)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        try:
            yield uploads
        except BaseException:
            try:
                uploads.end()
                atexit.register(shutil.rmtree, work, ignore_errors=True)
            except WriteError as error:
                tell(str(error))
            except KeyboardInterrupt:
                tell(f"not all of the training may be in {url}: it is kept in {folder}")
            raise
        uploads.end()
        atexit.register(shutil.rmtree, work, ignore_errors=True)
    finally:
        lock.release()


def _machine(place: Path) -> str:
    """Returns what those have in common who see one lock at ``place``."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {place.resolve()}"


def _is_ours(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    is_kept = folder == CHECKPOINTS and checkpoint_files.is_ours(last)
    return name in FILES or is_kept or places.is_ours(name)


def _is_staged(name: str) -> bool:
    stage, _, rest = name.partition("/")
    return stage.startswith(_STAGE) and _is_ours(rest)


def _in_order(place: Path) -> list[str]:
    """Returns what is in a snapshot; first what the state in a checkpoint tells of, as on a disk:
    settings, rows, the best model."""
    kept = checkpoint_files.whole(path.name for path in (place / CHECKPOINTS).iterdir())
    names = [*FILES, *places.files_in(place)]
    names += [f"{CHECKPOINTS}/{part}" for parts in kept.values() for part in parts]
    names.append(_LIST)
    return [name for name in names if (place / name).is_file()]


def _link(path: Path, to: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(path, to)
        except FileNotFoundError:
            raise
        except OSError:  # A file system without them.
            shutil.copy2(path, to)
