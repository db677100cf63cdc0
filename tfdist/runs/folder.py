"""The output folder of ``tfdist train``: what lies where, whose it is, and what may be replaced.

A run folder is known by its mark, a file that also is its lock. What a training with --overwrite
writes stands in a folder of its own within it, until its first epoch has ended:

    .tfdist-new    written by the new training; the earlier one stands untouched
    .tfdist-next   whole; the earlier one's files are being removed
    .tfdist-last   its files are being moved up

Each stage is reached by one rename, and can be repeated: whatever is killed, the next start of a
training ends what was begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, cannot_write
from tfdist.records.buckets.urls import refuse_url, url_of
from tfdist.runs.files import read_config, write_json
from tfdist.runs.settings import Settings, Start
from tfdist.traces import places
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine import model_path
from tfdist.training.engine.folder_lock import FolderLock

MARK = ".tfdist-run"
_NEW, _NEXT, _LAST = ".tfdist-new", ".tfdist-next", ".tfdist-last"
FILES = (
    *("config.json", "history.csv", "evaluations.csv", "resources.csv"),
    *("metrics.json", "curves.png"),
    *("model.keras", "best.keras"),
)
CHECKPOINTS = "checkpoints"
# So they are called while written: by ``replacing``, and in folders by ``Strategy.save``.
_UNFINISHED = re.compile(
    "|".join(rf"\.{re.escape(name)}-\d+\.{name.partition('.')[2]}" for name in FILES), re.ASCII
)
_UNFINISHED_MODEL = re.compile(r"\.(model|best)\.keras-[a-z0-9_]{8}", re.ASCII)
# What a resumed training must share with the one it goes on from.
_FILES_ON_RESUME = ("model", "data")
_SAME_ON_RESUME = [o.name for o in dataclasses.fields(Settings) if o.metadata["same_on_resume"]]
_ANEW = Start()


def _placed(name: str) -> Any:
    """Returns the property of a run folder that tells where ``name`` is written now."""
    return property(lambda run: run.place / name)


class RunFolder:
    """One training's folder.

    Files: config.json, history.csv (a row per epoch), evaluations.csv where an evaluator stands
    beside the training, resources.csv (a row per epoch and rank), metrics.json, curves.png,
    model.keras, best.keras where one is kept, checkpoints/, and profile/ where steps were traced.
    Each is written under a temporary name, ".NAME-...", and renamed.

    Attributes:
        path: as the user named it.
        place: where the training writes now: the folder itself, or one within it.
    """

    def __init__(self, path: str | os.PathLike):
        refuse_url(path, "the output of a training")
        self.path = Path(path)

    @property
    def place(self) -> Path:
        return self.path / _NEW if self.is_staged else self.path

    @property
    def is_staged(self) -> bool:
        """Whether an earlier training stands until the first epoch of this one has ended."""
        return (self.path / _NEW).is_dir()

    config = _placed("config.json")
    history = _placed("history.csv")
    evaluations = _placed("evaluations.csv")
    resources = _placed("resources.csv")
    metrics = _placed("metrics.json")
    curves = _placed("curves.png")
    model = _placed("model.keras")
    best_model = _placed("best.keras")
    checkpoints = _placed(CHECKPOINTS)
    traces = _placed(places.FOLDER)

    # A training in it ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def taken(
        self,
        config: dict[str, Any],
        start: Start = _ANEW,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Iterator[None]:
        """Encloses a training: the folder is its own, and left as it was where it came to nothing.

        Args:
            tell: is told in one line what became of a training that was to replace another.

        Raises:
            OptionError: the folder exists and neither option was given, it is not a training's, it
                must not be replaced, or its path is none for checkpoints.
            InUseError: another training is in it.
            WriteError: it cannot be written.
        """
        checkpoint_files.check_path(self.path.absolute())
        made = self._made()
        lock = None
        try:
            self._check_ours(start)
            lock = FolderLock(self.path / MARK)
            is_new = self._prepare(config, start, tell)
            before = None
            there = checkpoint_files.finished(self.checkpoints)
            try:
                if start.rescale and not is_new:
                    before = read_config(self.config)
                write_json(self.config, config)
                yield
            except BaseException:
                self.remove_unfinished()
                if before is not None and checkpoint_files.finished(self.checkpoints) == there:
                    write_json(self.config, before)  # The epoch that was begun has its own size.
                self._leave(is_new, tell)
                raise
            self.remove_unfinished()  # An attempt before the last one may have been killed.
        finally:
            if lock is not None:
                lock.release()
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # When nothing was left in it.

    def _made(self) -> list[Path]:
        """Makes the folder; returns what was made for it, the outermost first."""
        missing = [p for p in (self.path, *self.path.parents) if not os.path.lexists(p)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--output must be a folder that can be made, not {self.path}",
                received=f"an error: {error.strerror}",
                mend="Choose another folder",
            ) from None
        return missing[::-1]

    def _check_ours(self, start: Start) -> None:
        """Checks that the folder is empty, or a training's.

        Raises:
            OptionError: it holds something else.
        """
        mark = self.path / MARK
        if mark.is_file() and not mark.is_symlink():
            return
        names = {path.name for path in self.path.iterdir()}
        if not names:
            return
        # Trainings of earlier versions have no mark.
        if not (self._is_ours_alone(names) if start.overwrite else self._has_settings()):
            raise OptionError(
                "--output must be a new folder, or one of an earlier training",
                received=f"{self.path}, which holds something else",
                mend="Choose another folder",
            )
        if not (start.resume or start.overwrite):
            raise self._exists()

    def _exists(self) -> OptionError:
        return OptionError(
            "--output must be a new folder",
            received=f"{self.path}, which exists",
            mend="Add --resume to go on, --overwrite to start anew, or choose another",
        )

    def _has_settings(self) -> bool:
        try:
            read_config(self.path / "config.json")
        except DataError:
            return False
        return True

    def _is_ours_alone(self, names: set[str]) -> bool:
        known = (
            n in (*FILES, CHECKPOINTS, places.FOLDER) or _is_unfinished(self.path / n)
            for n in names
        )
        kept = self.path / CHECKPOINTS
        inside = [path.name for path in kept.iterdir()] if kept.is_dir() else []
        return self._has_settings() and all(known) and all(map(checkpoint_files.is_ours, inside))

    def _prepare(self, config: dict[str, Any], start: Start, tell: Callable[[str], None]) -> bool:
        """Makes ready for a training; whether it is the first in the folder."""
        names = (*FILES, CHECKPOINTS, _NEW, _NEXT, _LAST)
        if not any(os.path.lexists(self.path / name) for name in names):
            return True
        if not (start.resume or start.overwrite):
            raise self._exists()
        self.settle()
        if start.overwrite:
            self._check_replaceable(config)
            self._remove_staged()
            try:
                (self.path / _NEW).mkdir()
            except OSError as error:
                raise cannot_write(self.path / _NEW, error) from error
            return False
        if self.is_staged and not checkpoint_files.finished(self.checkpoints):
            self._remove_staged()
            tell(f"{self.path} holds the earlier training: what was to replace it had not begun")
        elif self.is_staged:
            tell(f"going on with the training that is to replace the earlier one in {self.path}")
        self._check_same(config, may_change=("global_batch_size",) if start.rescale else ())
        self.remove_unfinished()
        return False

    def _leave(self, is_new: bool, tell: Callable[[str], None]) -> None:
        """Takes back what a training wrote that ended before it had anything to keep."""
        has_checkpoints = bool(checkpoint_files.finished(self.checkpoints))
        if self.is_staged:
            if has_checkpoints:
                tell(
                    f"{self.path} holds the earlier training until an epoch of the new one has "
                    "ended; --resume goes on with the new one"
                )
            else:
                self._remove_staged()
        elif is_new and not has_checkpoints and not self.history.exists():
            checkpoint_files.remove_all(self.checkpoints)
            places.remove_all(self.traces)
            self.config.unlink(missing_ok=True)
            self.resources.unlink(missing_ok=True)
            (self.path / MARK).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Removes what killed processes have left half-written; they have all ended."""
        self.settle()
        for left in list(self.place.iterdir()) if self.place.is_dir() else ():
            if _is_unfinished(left):
                checkpoint_files.remove(left)
        if self.checkpoints.is_dir():
            checkpoint_files.remove_unfinished(self.checkpoints)
        places.remove_unfinished(self.traces)

    def _check_same(self, config: dict[str, Any], may_change: Sequence[str]) -> None:
        before = read_config(self.config)
        same = [key for key in _SAME_ON_RESUME if key not in may_change]
        changed = [key for key in same if before.get(key) != config.get(key)]
        for key in _FILES_ON_RESUME:
            if not _is_same_file(before, config, key):
                changed.append(key)
        # An earlier tfdist did not write it down.
        if not changed and before.get("records") not in (None, config.get("records")):
            raise OptionError(
                "--resume must have the records of the training it goes on from, read as they were",
                received=f"other records in {_shown(config, 'data')}, or another way to read them",
                mend="Give back the manifest that it had, or train into another --output",
            )
        if changed:
            raise OptionError(
                f"--resume must have the {' and '.join(changed)} of the training it goes on from",
                received=", ".join(f"{key}={_shown(config, key)}" for key in changed),
                mend="Give " + ", ".join(f"{key}={_shown(before, key)}" for key in changed),
            )

    # The place of an earlier one ----------------------------------------------------------------

    def replace_earlier(self) -> None:
        """Has this training take the place of the earlier one, if there is one.

        Raises:
            WriteError: files cannot be removed or moved; the next start of a training ends it.
        """
        if self.is_staged:
            try:
                os.rename(self.path / _NEW, self.path / _NEXT)
            except OSError as error:
                raise cannot_write(self.path, error) from error
            self.settle()

    def settle(self) -> None:
        """Ends the replacing of an earlier training, should it have been broken off."""
        try:
            if (self.path / _NEXT).is_dir():
                for name in FILES:
                    (self.path / name).unlink(missing_ok=True)
                checkpoint_files.remove_all(self.path / CHECKPOINTS)
                places.remove_all(self.path / places.FOLDER)
                os.rename(self.path / _NEXT, self.path / _LAST)
            if (self.path / _LAST).is_dir():
                self._move_up()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _move_up(self) -> None:
        last = self.path / _LAST
        kept = last / CHECKPOINTS
        if kept.is_dir():
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            for path in kept.iterdir():
                os.replace(path, self.path / CHECKPOINTS / path.name)
            kept.rmdir()
        places.move_all(last / places.FOLDER, self.path / places.FOLDER)
        for path in last.iterdir():
            os.replace(path, self.path / path.name)
        last.rmdir()

    def _remove_staged(self) -> None:
        shutil.rmtree(self.path / _NEW, ignore_errors=True)

    def _check_replaceable(self, config: dict[str, Any]) -> None:
        for what, place in _not_to_be_replaced(config):
            if place.resolve().is_relative_to(self.path.resolve()):
                raise OptionError(
                    f"--overwrite must not replace a folder that contains {what}",
                    received=self.path,
                    mend="Choose another folder",
                )
        names = (*FILES, CHECKPOINTS, places.FOLDER, _NEW)
        for path in (self.path, *(self.path / name for name in names)):
            is_as_written = path.is_file() if path.name in FILES else path.is_dir()
            if path.is_symlink() or (path.exists() and not is_as_written):
                raise OptionError(
                    "--overwrite must find the files of a training as it wrote them",
                    received=f"{path}, a {'link' if path.is_symlink() else 'thing of its own'}",
                    mend="Choose another folder",
                )


def _not_to_be_replaced(config: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    yield "the working folder", Path.cwd()
    yield "the data", Path(config["data"])
    if config.get("init_weights"):
        yield "the weights of --init-weights", Path(config["init_weights"])
    yield "the program", Path(sys.argv[0] or sys.executable)
    yield "the program", Path(__file__)
    yield "the program", Path(sys.prefix)
    place = model_path.parts(config["model"])[0]
    if place.endswith(".py"):
        yield "the model", Path(place)
    else:
        # As the ranks will find it; its package is not imported for that.
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(place.partition(".")[0])
            if found is not None and found.origin is not None:
                yield "the model", Path(found.origin)
        yield "the model", Path(place.partition(".")[0]).absolute()


def _is_unfinished(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return bool(_UNFINISHED_MODEL.fullmatch(path.name))
    return bool(_UNFINISHED.fullmatch(path.name))


def _is_same_file(before: dict[str, Any], now: dict[str, Any], key: str) -> bool:
    then, today = _file(before, key), _file(now, key)
    if then == today:
        return True
    # A project that was moved as a whole has the same words for it.
    return before[key] == now[key] and not os.path.exists(then[0])


def _file(config: dict[str, Any], key: str) -> tuple[Path, str]:
    """Returns the file that a setting names, and the name in it."""
    place, name = config[key], ""
    if key == "model":
        place, name = model_path.parts(place)
        if not place.endswith(".py"):
            return Path(place), name  # A module.
    return Path(os.path.realpath(Path(config.get("working_folder") or "", place))), name


def _shown(config: dict[str, Any], key: str) -> object:
    if key not in _FILES_ON_RESUME or url_of(config[key]):
        return config.get(key)
    place, name = _file(config, key)
    return f"{place}:{name}" if name else place
