"""What is left of a search: a table, the best trial, charts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import extra_module
from tfdist.records.replacing import replacing
from tfdist.tuning.folder import SearchFolder

if TYPE_CHECKING:
    from tfdist.tuning.rows import TrialRow
    from tfdist.tuning.study import Study


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        folder: all of it.
        rows: its trials.
        best: the best of those that came to their end; None where none did.
        charts: their files; empty where matplotlib is missing.
    """

    folder: Path
    rows: list[TrialRow]
    best: TrialRow | None
    charts: list[Path]

    @property
    def best_folder(self) -> Path:
        """That of the best trial, with its model.keras; with folds in fold-0, fold-1, ..."""
        folder = SearchFolder(self.folder)
        is_linked = self.best is None or os.path.lexists(folder.best)  # Not on each file system.
        return folder.best if is_linked else folder.trial(self.best.number)

    @property
    def command(self) -> str:
        """What trains the best one in full: with the test, and without anything of the search."""
        options = str(SearchFolder(self.folder).best_options)
        place = self.folder.resolve()  # Also of "." and "..".
        output = str(place.with_name(f"{place.name}-best"))
        return shlex.join(["tfdist", "train", "--config", options, "--output", output])


def best_of(study: Study, rows: list[TrialRow]) -> TrialRow | None:
    """Returns the best trial that has come to its end, of equal ones the first."""
    complete = [each for each in study.trials if each.state.name == "COMPLETE"]
    return rows[study.optuna.best_trial.number] if complete else None


def write_options(folder: SearchFolder, options: Mapping[str, Any]) -> None:
    """Writes best.yaml, which ``tfdist train --config`` reads."""
    import yaml

    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    with replacing(folder.best_options) as temporary:
        temporary.write_text(text, encoding="utf-8")


def draw(study: Study, folder: Path, metric: str) -> list[Path]:
    """Draws what Optuna draws, as far as there is enough for it; returns the files.

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    import warnings

    pyplot = extra_module("matplotlib.pyplot", "matplotlib", "charts", "plots")
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as drawing

    complete = [each for each in study.trials if each.state.name == "COMPLETE"]
    has_params = bool(complete) and bool(complete[0].params)
    differ = len({each.value for each in complete}) > 1
    own, named = study.optuna, {"target_name": metric}
    made = {"history": lambda: drawing.plot_optimization_history(own, **named)}
    made["epochs"] = lambda: drawing.plot_intermediate_values(own)
    if has_params:
        made["slices"] = lambda: drawing.plot_slice(own, **named)
    if has_params and differ:
        evaluator = PedAnovaImportanceEvaluator()
        made["importances"] = lambda: drawing.plot_param_importances(
            own, evaluator=evaluator, **named
        )
    written = []
    for name, plot in made.items():
        with warnings.catch_warnings():  # Optuna calls its charts experimental.
            warnings.simplefilter("ignore")
            axes = plot()
        first = axes if hasattr(axes, "figure") else axes.ravel()[0]
        path = folder / f"{name}.png"
        with replacing(path) as temporary:
            first.figure.savefig(temporary, dpi=110, bbox_inches="tight")
        pyplot.close(first.figure)
        written.append(path)
    return written
