"""The output folder of a search: what lies where, and whose it is."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError, WriteError, cannot_write, read_json, spelt
from tfdist.records.buckets.urls import refuse_url
from tfdist.records.replacing import replacing
from tfdist.runs.files import write_json
from tfdist.training.engine.folder_lock import FolderLock
from tfdist.tuning import study
from tfdist.tuning.request import Search
from tfdist.tuning.rows import TrialRow

MARK = ".tfdist-search"


class SearchFolder:
    """One search's folder.

    Files: search.json, journal.log (Optuna's), trials.csv, best.yaml, charts; trials/NNN, the run
    folders; logs/NNN.log, what their processes print; best, a link to the best trial; folds/, the
    manifests of a cross-validation.
    """

    def __init__(self, path: Path):
        refuse_url(path, "the output of a search")
        self.path = path
        self.settings = path / "search.json"
        self.journal = path / "journal.log"
        self.table = path / "trials.csv"
        self.best = path / "best"
        self.best_options = path / "best.yaml"
        self.folds = path / "folds"
        self._trials = path / "trials"

    def trial(self, number: int) -> Path:
        return self._trials / f"{number:03d}"

    def log(self, number: int) -> Path:
        return self.path / "logs" / f"{number:03d}.log"

    def remove_trials(self) -> None:
        """Removes what trials have written that are not to count; their processes have ended."""
        for trial in self._trials.iterdir():
            shutil.rmtree(trial, ignore_errors=True)

    @contextlib.contextmanager
    def taken(self, settings: dict[str, Any], *, resume: bool) -> Iterator[None]:
        """Encloses a search: the folder is its own.

        Args:
            settings: what must be the same where it is gone on with.

        Raises:
            OptionError: it holds something else, a search that is not to go on, or another one.
            InUseError: another search is in it.
        """
        known = self.path.is_dir() and any(self.path.iterdir())
        if known and not (self.path / MARK).is_file():
            raise OptionError(
                "--output must be a new folder, or one of an earlier search",
                received=f"{self.path}, which holds something else",
                mend="Choose another folder",
            )
        if self.settings.exists():
            self._check_same(settings, resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path / MARK)
            for place in (self._trials, self.path / "logs"):
                place.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            if not self.settings.exists():
                write_json(self.settings, settings)
            study.mend(self.journal)
            yield
        except BaseException:
            if not any(self._trials.iterdir()):  # It has come to nothing: others may begin here.
                for file in (self.settings, self.journal, self.table):
                    file.unlink(missing_ok=True)
            raise
        finally:
            lock.release()

    def _check_same(self, settings: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise OptionError(
                "--output must be a new folder",
                received=f"{self.path}, which holds a search",
                mend=f"Add {spelt('resume', True)} to go on with it, or choose another",
            )
        try:
            before = {**read_json(self.settings.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError) as error:
            raise study.damaged(self.settings, error) from None
        # An earlier tfdist did not have all of them: what it did is the default.
        before = {each.name: each.default for each in dataclasses.fields(Search)} | before
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            raise OptionError(
                f"--resume must have the {' and '.join(changed)} of the search it goes on with",
                received=", ".join(f"{name}={settings[name]}" for name in changed),
                mend="Give " + ", ".join(f"{name}={before.get(name)}" for name in changed),
            )

    def write_table(self, rows: Sequence[TrialRow]) -> None:
        """Writes trials.csv: a row for each trial, a column for each that was chosen."""
        names = list(dict.fromkeys(name for row in rows for name in row.params))
        with (
            replacing(self.table) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(["trial", "state", "epoch", "value", *names, "reason"])
            for row in rows:
                chosen = [row.params.get(name) for name in names]
                writer.writerow([row.number, row.state, row.epoch, row.value, *chosen, row.reason])

    def link_best(self, number: int) -> None:
        """Has ``best`` lead to a trial's folder, where the file system has links."""
        try:
            with replacing(self.best) as temporary:
                os.symlink(self.trial(number).relative_to(self.path), temporary)
        except WriteError:
            if os.path.lexists(self.best):  # It leads to a trial that was the best one before.
                raise
