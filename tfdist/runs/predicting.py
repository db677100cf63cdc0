"""``tfdist.predict``: a trained model's outputs for each record, in the processes of a strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError
from tfdist.runs import ranks
from tfdist.runs.ranks import Where
from tfdist.training import model_path
from tfdist.training.options import check_count

if TYPE_CHECKING:
    import numpy as np

RANK = "tfdist.runs.predict_rank"
_SUFFIXES = (".npz", ".npy")


@dataclass(frozen=True)
class Predictions:
    """The outputs of a model that were written.

    Attributes:
        output: the file.
        outputs: name -> shape and type of an array in it; a single output is "predictions".
    """

    output: Path
    outputs: dict[str, tuple[tuple[int, ...], str]]

    def load(self) -> dict[str, np.ndarray]:
        """Returns name -> rows, one for each record, in their order."""
        import numpy as np

        found = np.load(self.output, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return dict.fromkeys(self.outputs, found)
        with found:
            return dict(found)


def predict(
    model: str | Callable[[], Any],
    weights: str | os.PathLike,
    data: str | os.PathLike,
    output: str | os.PathLike,
    *,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | None = None,
    controller: str | None = None,
    start_timeout_s: float = 120.0,
    stall_timeout_s: float = 300.0,
    global_batch_size: int = 256,
    overwrite: bool = False,
) -> Predictions | None:
    """Writes a trained model's outputs for each record: what ``tfdist predict`` does.

    TensorFlow may already be in use in this process, as in a notebook. Each number is that of one
    device.

    Args:
        model: as in ``tfdist.train``; it makes the model that the weights are read into.
        weights: of the trained model: a .keras, .h5 or .weights.h5 file.
        data: one split of shards, as "data/digits/test".
        output: a new file: .npz has the array "predictions", or each of several outputs by its
            name; .npy has the only one.
        strategy: a registered name, or "auto".
        options: of the strategy.
        workers: number of processes; None is the strategy's own default.
        ps: number of parameter servers, where the strategy has them.
        hosts: "A:2,B:2", with their slots, reached by ssh; None is this machine.
        controller: what starts and connects the processes of horovod, "mpi" or "gloo".
        start_timeout_s: until every process must have started.
        stall_timeout_s: longest silence of a running job.
        global_batch_size: records in one step, over all replicas.
        overwrite: replace ``output`` when all is predicted.

    Returns:
        What was written; None on a rank that srun or mpirun has started, unless it is the chief.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank.
        RankFailedError: a process failed otherwise; its last lines were printed.
    """
    where, note = ranks.asked(
        "tfdist.predict",
        strategy,
        options,
        workers=workers,
        ps=ps,
        hosts=hosts,
        controller=controller,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
    )
    if note is not None:
        print(note, flush=True)
    check_count("global_batch_size", global_batch_size)
    return carry_out(
        where,
        model=model_path.of(model),
        weights=Path(weights),
        data=os.fspath(data),
        output=Path(output),
        global_batch_size=global_batch_size,
        overwrite=overwrite,
    )


def carry_out(
    where: Where,
    *,
    model: str,
    weights: Path,
    data: str,
    output: Path,
    global_batch_size: int,
    overwrite: bool,
    on_event: Callable[[int, dict[str, Any]], None] = lambda rank, event: None,
) -> Predictions | None:
    """Predicts on ``where``; see ``predict`` for what it returns and raises.

    Args:
        on_event: see ``ranks.run``.
    """
    model_path.check(model)
    _check(weights, output, overwrite=overwrite)
    config = {
        "model": model,
        "weights": os.path.abspath(weights),
        "data": data,
        "output": os.path.abspath(output),
        "strategy": where.strategy,
        "options": where.options,
        "global_batch_size": global_batch_size,
    }
    outputs: dict[str, tuple[tuple[int, ...], str]] = {}

    def take(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "predicted":
            outputs.update(
                (name, (tuple(shape), dtype)) for name, (shape, dtype) in event["outputs"].items()
            )
        on_event(rank, event)

    ranks.run(RANK, config, where, take)
    return Predictions(output, outputs) if where.is_chief else None


def _check(weights: Path, output: Path, *, overwrite: bool) -> None:
    """Raises:
    OptionError: no such weights, or an output that cannot be written or must not be replaced.
    """
    if not weights.is_file():
        raise OptionError(
            "--weights must be a file that Keras wrote",
            received=f"{weights}, which is none",
            mend="Give the model.keras in the output of a training",
        )
    if output.suffix not in _SUFFIXES:
        raise OptionError(f"--output must end with {' or '.join(_SUFFIXES)}", received=str(output))
    if not output.absolute().parent.is_dir():
        raise OptionError(
            "--output must lie in a folder that exists",
            received=f"no folder {output.parent}",
            mend="Make it first",
        )
    if output.is_dir() or (output.exists() and not overwrite):
        raise OptionError(
            "--output must be a new file",
            received=f"{output}, which is there already",
            mend="Give another name" if output.is_dir() else "Give another name, or --overwrite",
        )
