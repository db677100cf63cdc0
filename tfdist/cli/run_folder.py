"""The output folder of ``tfdist train``: what lies where, and what may be written over."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError

# What a resumed training must share with the one it goes on from.
_SAME_ON_RESUME = ("model", "data", "global_batch_size", "seed")


class RunFolder:
    """One training's folder.

    Files: config.json, history.csv (a row per epoch), metrics.json, curves.png, model.keras, and
    checkpoints/. Each is written under a temporary name and renamed.
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
                "--output must be a folder that can be made", received=error
            ) from None
        write_json(self.config, config)

    def discard_if_untrained(self) -> None:
        """Removes the folder of a training that ended before it had anything to keep."""
        if not self.history.exists() and not self.checkpoints.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def _check_same(self, config: dict[str, Any]) -> None:
        before = json.loads(self.config.read_text())
        changed = [key for key in _SAME_ON_RESUME if before.get(key) != config.get(key)]
        if changed:
            raise OptionError(
                f"--resume needs the {' and '.join(changed)} of the training it goes on from",
                received=", ".join(f"{key}={config.get(key)}" for key in changed),
                mend="Give " + ", ".join(f"{key}={before.get(key)}" for key in changed),
            )


def read_history(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a history.csv, none when there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            {key: _number(key, value) for key, value in row.items() if value not in ("", None)}
            for row in csv.DictReader(file)
        ]


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
def replacing(path: Path):
    """Yields a temporary path beside ``path`` that takes its place when all went well."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
