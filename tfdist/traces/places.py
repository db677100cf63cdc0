"""The files of a trace: where TensorBoard's page Profile looks for them, one host for each rank."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

#: Within the folder of a training.
FOLDER = "profile"
# TensorBoard shows each folder in plugins/profile as a run, and each file in it as a host.
_RUN = "plugins/profile/tfdist"
_NAME = re.compile(r"rank-\d{1,6}\.(?:xplane\.pb|json)", re.ASCII)
# Begins the name of the folder beside them that a rank traces into.
_UNFINISHED = ".tracing-"


def run_of(folder: str | os.PathLike) -> Path:
    """Returns where the files of a trace lie that was asked for in ``folder``."""
    return Path(folder, _RUN)


def events_of(run: Path, rank: int) -> Path:
    """Returns the file of what TensorFlow's profiler has seen on a rank."""
    return run / f"rank-{rank}.xplane.pb"


def notes_of(run: Path, rank: int) -> Path:
    """Returns the file of what the rank itself says of its steps."""
    return run / f"rank-{rank}.json"


def files_in(training: Path) -> list[str]:
    """Returns the files of the trace in the folder of a training, relative to it."""
    return [str(path.relative_to(training)) for path in sorted(_own_in(run_of(training / FOLDER)))]


def _own_in(run: Path) -> list[Path]:
    found = run.iterdir() if run.is_dir() else ()
    return [path for path in found if _NAME.fullmatch(path.name)]


def is_ours(name: str) -> bool:
    """Whether a name relative to the folder of a training is that of a file of its trace."""
    place, _, last = name.rpartition("/")
    return place == f"{FOLDER}/{_RUN}" and bool(_NAME.fullmatch(last))


def unfinished_of(rank: int) -> str:
    """Returns how the name of the folder begins that a rank traces into."""
    return f"{_UNFINISHED}{rank}-"


def remove_unfinished(folder: Path, begins: str = _UNFINISHED) -> None:
    """Removes what ranks that were killed have left in ``folder``; they have ended.

    Args:
        begins: the name of what is removed: that of one rank, or of all.
    """
    for path in run_of(folder).glob(f"{begins}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_all(folder: Path) -> None:
    """Removes the trace in ``folder``, and the folders that nothing else is in."""
    remove_unfinished(folder)
    run = run_of(folder)
    for path in _own_in(run):
        path.unlink(missing_ok=True)
    for place in (run, run.parent, run.parent.parent, folder):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def move_all(folder: Path, to: Path) -> None:
    """Moves the trace in ``folder`` to another folder, where none is."""
    for path in _own_in(run_of(folder)):
        run_of(to).mkdir(parents=True, exist_ok=True)
        path.replace(run_of(to) / path.name)
    remove_all(folder)
