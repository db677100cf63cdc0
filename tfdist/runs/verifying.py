"""``tfdist.verify``: a strategy, started or by name, against one device."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError, OptionError
from tfdist.launch.jobs import Where
from tfdist.runs import ranks
from tfdist.runs.training import find_splits
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_seed, check_values, option, picked

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.equivalence import Report
    from tfdist.strategies.base import Strategy

RANK = "tfdist.runs.verify_rank"


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """How a strategy is compared with one device; ``verify`` says what each means."""

    steps: int = option(20, "Of more than an epoch has, whole epochs are taken.", least=1)
    global_batch_size: int = option(64, "Records in one step, over all replicas.", least=1)
    seed: int = option(0, "Of weights and order.")
    tolerance: float = 1e-5
    explain: bool = option(
        False, "Where weights part, look for the first layer and the first step. Takes longer."
    )


def verify(
    model_fn: str | Callable[[], tf.keras.Model] | tf.keras.Model,
    data: Any,
    strategy: str | Strategy,
    *,
    steps: int = 20,
    global_batch_size: int = 64,
    seed: int = 0,
    tolerance: float = 1e-5,
    batched: bool | None = None,
    explain: bool = False,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | None = None,
    controller: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float = 300.0,
) -> Report | None:
    """Trains ``steps`` steps on ``strategy`` and on one device, and compares.

    A started strategy is compared in this process. That of a name is compared in processes of its
    own, as ``tfdist verify`` does.

    Args:
        model_fn: as in ``strategy.build``; with a name as ``model`` in ``tfdist.train``.
        data: as in ``strategy.dataset``; with a name shards, of which the split train is taken
            unless "DIR/SPLIT" names one.
        strategy: a started strategy, under a launcher every rank calls this; or a registered name,
            or "auto".
        steps: steps to take, the last of each epoch on an uneven batch.
        global_batch_size: rows of one step.
        seed: of the weights and of the order of records.
        tolerance: the largest difference that counts as equal.
        batched: as in ``strategy.dataset``, of a started strategy alone.
        explain: look, when the weights are others, for the first layer and the first step that
            part (``Report.explanation``). It takes some more comparisons.
        options: of the strategy that is named.
        workers: with a name: number of processes; None is the strategy's own default.
        ps: with a name: number of parameter servers, where the strategy has them.
        hosts: with a name: "A:2,B:2", with their slots, reached by ssh; None is this machine.
        controller: with a name: what starts and connects the processes of horovod, "mpi" or "gloo".
        start_timeout_s: with a name: until every process must have started.
        stall_timeout_s: with a name: longest silence of a running job.

    Returns:
        The report on the chief; None on other ranks.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank.
        RankFailedError: a process failed otherwise; its last lines were printed.
    """
    given = locals()
    if not isinstance(strategy, str):
        from tfdist import equivalence

        _refuse_processes(given)
        return equivalence.verify(
            model_fn, data, strategy, batched=batched, **picked(Comparing, given)
        )
    where = ranks.asked("tfdist.verify", model_fn, **picked(Where, given))
    _check_data(data, batched)
    return carry_out(
        where,
        model=model_path.of(model_fn),
        data=os.fspath(data),
        comparing=Comparing(**picked(Comparing, given)),
    )


def carry_out(
    where: Where,
    *,
    model: str,
    data: str,
    comparing: Comparing,
    on_event: Callable[[int, dict[str, Any]], None] = lambda rank, event: None,
) -> Report | None:
    """Compares on ``where``; see ``verify`` for what it returns and raises.

    Args:
        on_event: see ``ranks.run``.
    """
    model_path.check(model)
    check_seed(comparing.seed)
    check_values(comparing)
    with tempfile.TemporaryDirectory(prefix="tfdist-verify-") as folder:
        config = {
            "model": model,
            "data": find_splits(data)["train"],
            "comparing": asdict(comparing),
            "report": str(Path(folder, "report")),
        }
        ranks.run(RANK, config, where, on_event)
        return pickle.loads(Path(config["report"]).read_bytes()) if where.is_chief else None


def _refuse_processes(given: Mapping[str, Any]) -> None:
    """Raises OptionError for what only a name takes beside a started strategy."""
    names = ("options", "workers", "ps", "hosts", "controller")
    named = [name for name in names if given[name] is not None]
    if named:
        raise OptionError(
            "options and processes must go with the name of a strategy",
            received=f"{', '.join(named)} with a strategy that has them already",
            mend="Give the name, as tfdist.verify(..., 'mirrored', options={'devices': 2})",
        )


def _check_data(data: Any, batched: bool | None) -> None:
    """Checks that other processes can read the data.

    Raises:
        DataError: they cannot.
        OptionError: shards are never in batches.
    """
    if not isinstance(data, (str, os.PathLike)):
        raise DataError(
            "data must be shards where the strategy is a name, for other processes read them",
            received=type(data).__name__,
            mend="Write them with tfdist.records.write, or give a started strategy",
        )
    if batched is not None:
        raise OptionError(
            "batched must go with a started strategy",
            received=f"batched={batched} with the name of one, which reads shards",
            mend="Leave it out",
        )
