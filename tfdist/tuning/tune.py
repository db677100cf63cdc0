"""``tfdist.tune``: many trainings, of which Optuna chooses what each is given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import EngineMissingError, unknown_choice
from tfdist.launch.jobs import Where
from tfdist.planning.yaml_file import read_yaml
from tfdist.runs import ranks
from tfdist.runs.settings import Settings
from tfdist.training.engine import model_path
from tfdist.training.engine.options import picked
from tfdist.tuning import folds, on_ray, results, study
from tfdist.tuning import space as spaces
from tfdist.tuning.folder import SearchFolder
from tfdist.tuning.request import Request, Search
from tfdist.tuning.results import Found
from tfdist.tuning.rows import TrialRow
from tfdist.tuning.searching import Searching
from tfdist.tuning.study import Study


def tune(
    model: str | Callable[..., Any],
    data: str | os.PathLike,
    output: str | os.PathLike,
    *,
    space: Mapping[str, Any] | str | os.PathLike | None = None,
    trials: int = 20,
    parallel: int = 1,
    on: str = "here",
    metric: str = "val_loss",
    pruner: str = "halving",
    grace: int = 1,
    reduction: int = 3,
    folds: int | None = None,
    resume: bool = False,
    max_restarts: int = 0,
    on_change: Callable[[TrialRow], None] = lambda row: None,
    **training: Any,
) -> Found:
    """Searches for hyperparameters, on Optuna: what ``tfdist tune`` does.

    Each trial is a training in processes of its own, in a run folder of its own. After ``grace``
    epochs, ``grace * reduction``, ... one trial in ``reduction`` of those that came so far goes on
    from its checkpoint; the others end there (asynchronous successive halving, Li et al. 2020,
    https://arxiv.org/abs/1810.05934, as Optuna's ``SuccessiveHalvingPruner`` decides), or as
    ``pruner`` says. What the next trial is given, Optuna's ``TPESampler`` chooses.

    Args:
        model: as in ``tfdist.train``; a function of the arguments that ``space`` names, or, without
            ``space``, of ``trial``, a trial of Optuna's.
        data: as in ``tfdist.train``; the split test is left for the model that is chosen.
        output: the folder of the search, a new one, or that of a search to go on with.
        space: name -> ``{"low": 1e-4, "high": 0.1, "log": True}`` (``"int": True`` for whole
            numbers) or a list of values; or a YAML file of it. Under "train" stand options of the
            training: lr, global_batch_size, seed, augment, class_weight, pad_to.
        trials: trials in all, with those before ``resume``.
        parallel: trials at a time; each has its part of the cores, or of the GPUs.
        on: "here": trials run on this machine; "ray": on the Ray cluster at RAY_ADDRESS, else on
            one of this machine. Each then has as many cores, or GPUs, of one node as let
            ``parallel`` run, and ``output`` lies on a file system that all nodes share. A trial
            whose node is lost is tried again once.
        metric: what is compared: its value after the last epoch of a trial; "f,mode=max" where
            the name does not tell which is better.
        pruner: "halving"; "median": after ``grace`` epochs, ``2 * grace``, ... a trial whose best
            value is worse than the median of those that came to their end goes on no further, as
            soon as five have (Optuna's ``MedianPruner``); "none": all train to the end.
        grace: epochs before a trial may end early; as many as ``epochs``: none does.
        reduction: of halving: one trial in so many goes on.
        folds: cross-validation on so many parts of the shards of the split train; the value of a
            trial is the mean.
        resume: go on with the search in ``output``: trials that were running go on from their
            checkpoints, those that have ended are not run again.
        max_restarts: of each training, as in ``tfdist.train``.
        on_change: is called with each trial that has changed.
        training: others of ``tfdist.train``: strategy, options, workers, epochs, seed and so on,
            alike for all trials.

    Returns:
        The trials, and the best of them.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank of the first trial.
        EngineMissingError: Optuna, or Ray with ``on="ray"``, is not installed.
    """
    given = locals()
    of_where, of_settings = picked(Where, training), picked(Settings, training)
    for name in training:
        if name not in of_where | of_settings:
            known = [*Where.__dataclass_fields__, *Settings.__dataclass_fields__]
            raise unknown_choice("option of tfdist.tune", name, known)
    if isinstance(space, (str, os.PathLike)):
        space = read_yaml(Path(space))
    request = Request(
        model=model_path.of(model),
        data=os.fspath(data),
        output=Path(output),
        space=None if space is None else spaces.parsed(space),
        search=Search(**picked(Search, given)),
        settings=Settings(**of_settings),
        where=ranks.asked("tfdist.tune", model, **of_where),
        max_restarts=max_restarts,
    )
    return carry_out(request, resume=resume, on_change=on_change)


def carry_out(request: Request, *, resume: bool, on_change: Callable[[TrialRow], None]) -> Found:
    """Searches as ``request`` says; see ``tune`` for what it returns and raises."""
    study.imported()
    if request.search.on == "ray":
        on_ray.imported()
    folder = SearchFolder(request.output)
    with folder.taken(request.check(), resume=resume):
        data = [request.data]
        if request.search.folds is not None:
            data = folds.write(request.data, request.search.folds, folder.folds)
        kept = Study(
            folder.journal,
            mode=request.monitor["mode"],
            seed=request.settings.seed,
            pruner=request.search.pruner,
            grace=request.search.grace,
            reduction=request.search.reduction,
        )
        searching = Searching(request, folder, kept, data, on_change)
        for row in searching.rows:
            on_change(row)
        try:
            searching.run()
        finally:
            _keep(searching, folder, kept, request)
        rows, charts = searching.rows, []
        with contextlib.suppress(EngineMissingError):  # Without matplotlib there are none.
            charts = results.draw(kept, folder.path, request.search.metric)
        return Found(folder.path, rows, results.best_of(kept, rows), charts)


def _keep(searching: Searching, folder: SearchFolder, kept: Study, request: Request) -> None:
    """Writes what is found so far: also of a search that is ended."""
    rows = searching.rows
    folder.write_table(rows)
    best = results.best_of(kept, rows)
    if best is not None:
        results.write_options(folder, request.options_of_train(*searching.chosen(best.number)))
        folder.link_best(best.number)
