"""The output folder of ``tfdist train``: what lies where, and what may be written over."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError, WriteError, cannot_write
from tfdist.training import checkpoint_files

# What a resumed training must share with the one it goes on from.
_SAME_ON_RESUME = ("model", "data", "global_batch_size", "seed")


class RunFolder:
    """One training's folder.

    Files: config.json, history.csv (a row per epoch), metrics.json, curves.png, model.keras, and
    checkpoints/. Each is written under a temporary name, ".NAME-...", and renamed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.history = self.path / "history.csv"
        self.metrics = self.path / "metrics.json"
        self.curves = self.path / "curves.png"
        self.model = self.path / "model.keras"
        self.checkpoints = self.path / "checkpoints"

    def open(self, config: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Makes the folder, or takes over an existing one, and writes the configuration.

        Raises:
            OptionError: the folder exists and neither option was given, or it is not a training's.
        """
        is_run = self.config.is_file()
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            if not is_run:
                raise OptionError(
                    "--output must be a new folder, or one of an earlier training",
                    received=f"{self.path}, which holds something else",
                    mend="Choose another folder",
                )
            if overwrite:
                shutil.rmtree(self.path)
            elif resume:
                self._check_same(config)
                self.remove_unfinished()
            else:
                raise OptionError(
                    "--output must be a new folder",
                    received=f"{self.path}, which exists",
                    mend="Add --resume to go on, --overwrite to start anew, or choose another",
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                "--output must be a folder that can be made", received=f"an error: {error}"
            ) from None
        try:
            write_json(self.config, config)
        except WriteError:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # When it is new, and so empty.
            raise

    def remove_unfinished(self) -> None:
        """Removes what killed processes have left half-written; they have all ended."""
        for path in (self.config, self.history, self.metrics, self.curves, self.model):
            for left in self.path.glob(f".{path.name}-*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
        checkpoint_files.remove_unfinished(self.checkpoints)

    def discard_if_untrained(self) -> None:
        """Removes the folder of a training that ended before it had anything to keep."""
        is_empty = not self.checkpoints.is_dir() or not any(self.checkpoints.iterdir())
        if not self.history.exists() and is_empty:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check_same(self, config: dict[str, Any]) -> None:
        try:
            before = json.loads(self.config.read_text())
        except ValueError as error:
            raise _damaged(self.config, error) from None
        changed = [key for key in _SAME_ON_RESUME if before.get(key) != config.get(key)]
        if changed:
            raise OptionError(
                f"--resume must have the {' and '.join(changed)} of the training it goes on from",
                received=", ".join(f"{key}={config.get(key)}" for key in changed),
                mend="Give " + ", ".join(f"{key}={before.get(key)}" for key in changed),
            )


def read_history(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a history.csv, none when there is no such file."""
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return [
                {key: _number(key, value) for key, value in row.items() if value not in ("", None)}
                for row in csv.DictReader(file)
            ]
    except (ValueError, TypeError, csv.Error) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} must be as tfdist train wrote it",
        received=f"an error: {error}",
        mend="Restore it, or train anew with --overwrite",
    )


def _number(column: str, text: str) -> float:
    return int(text) if column == "epoch" else float(text)


def write_history(path: Path, rows: list[dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when all went well.

    Raises:
        WriteError: it cannot be written, as on a full disk.
    """
    # The suffix stays last: some writers choose their format by it.
    temporary = path.with_name(f".{path.name}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
