"""``tfdist.evaluate``: trained models on the same records, in the processes of a strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.compat import follow_program
from tfdist.errors import DataError, OptionError
from tfdist.launch.jobs import Where
from tfdist.records.buckets.urls import url_of
from tfdist.runs import ranks
from tfdist.runs.files import read_config
from tfdist.runs.folder import RunFolder
from tfdist.runs.predicting import check_weights
from tfdist.runs.progress import Progress
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count

RANK = "tfdist.runs.predict_rank"


@dataclass(frozen=True)
class Evaluation:
    """What a trained model comes to.

    Attributes:
        weights: its file.
        records: of the split, each counted once.
        metrics: "loss", and by its name each metric that the model was compiled with.
    """

    weights: Path
    records: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        weights: its file, a .keras, .h5 or .weights.h5.
        model: the function that makes it, see ``model_path``.
        pad_to: what its training padded records to; None: what each batch needs.
    """

    weights: Path
    model: str
    pad_to: Any = None


def evaluate(
    *trained: str | os.PathLike,
    data: str | os.PathLike,
    model: str | Callable[[], Any] | None = None,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    global_batch_size: int = 256,
    **processes: Any,
) -> list[Evaluation] | None:
    """Evaluates trained models on a split of shards: what ``tfdist evaluate`` does.

    TensorFlow may already be in use in this process, as in a notebook. Each number is that of one
    device, to the last record.

    Args:
        trained: folders of ``tfdist train``, or files of weights (.keras, .h5, .weights.h5).
        data: one split of shards, as "data/digits/test".
        model: as in ``tfdist.train``; it makes the models that the weights are read into. None: the
            function that config.json names, in the folder or beside the file.
        strategy: a registered name, or "auto".
        options: of the strategy.
        global_batch_size: records in one step, over all replicas.
        processes: workers, ps, hosts, controller, start_timeout_s and stall_timeout_s, as in
            ``tfdist.predict``.

    Returns:
        One for each, in their order; None on a rank that srun or mpirun has started, unless it is
        the chief.

    Raises:
        TfdistError: a mistake of the user's, here or on a rank.
        RankFailedError: a process failed otherwise; its last lines were printed.
    """
    name = None if model is None else model_path.of(model)
    found = find([os.fspath(each) for each in trained], name)
    where = ranks.asked(
        "tfdist.evaluate", found[0].model, strategy=strategy, options=options, **processes
    )
    check_count("global_batch_size", global_batch_size)
    return carry_out(where, found, data=os.fspath(data), global_batch_size=global_batch_size)


def find(trained: Sequence[str], model: str | None) -> list[Trained]:
    """Returns what folders and files hold; see ``evaluate``.

    Raises:
        OptionError: there is none, one is no trained model, or nothing tells what makes it.
        DataError: a config.json that is not as it was written.
    """
    if not trained:
        raise OptionError("trained models must be given", mend="Name a folder of tfdist train")
    return [_find(Path(each), model) for each in trained]


def _find(path: Path, model: str | None) -> Trained:
    # Of the folder itself: what is to replace an earlier training stands within it until then.
    weights = path / RunFolder(str(path)).model.name if path.is_dir() else path
    check_weights(weights, "a trained model")
    config_file = weights.with_name("config.json")
    config = {}
    # Beside files of others may lie what is called so, too.
    with contextlib.nullcontext() if model is None else contextlib.suppress(DataError):
        config = read_config(config_file) if config_file.is_file() else {}
    if model is None and not config:
        raise OptionError(
            "a trained model must come with the function that makes it",
            received=f"{weights}, with no config.json beside it",
            mend="Give model (in the shell --model FILE.py:NAME): code in the file does not run",
        )
    if model is None and config.get("working_folder", os.getcwd()) != os.getcwd():
        raise OptionError(
            "a model must be made in the folder that it was trained in",
            received=f"{config['model']} of {config['working_folder']}",
            mend="Go there, or give model (in the shell --model FILE.py:NAME)",
        )
    name = config["model"] if model is None else model
    model_path.check(name)
    return Trained(weights, name, config.get("pad_to"))


def carry_out(
    where: Where,
    trained: Sequence[Trained],
    *,
    data: str,
    global_batch_size: int,
    on_event: Callable[[int, dict[str, Any]], None] = lambda rank, event: None,
) -> list[Evaluation] | None:
    """Evaluates one after the other on ``where``; see ``evaluate`` for what it gives and raises.

    Args:
        on_event: see ``ranks.run``.
    """
    found: list[Evaluation] = []
    for each in trained:
        follow_program(os.environ, model_path.parts(each.model)[0], each.weights)
        config = {
            "model": each.model,
            "weights": os.path.abspath(each.weights),
            "data": data,
            "pad_to": each.pad_to,
            "global_batch_size": global_batch_size,
        }

        def take(rank: int, event: dict[str, Any], weights: Path = each.weights) -> None:
            if event["event"] == "found":
                found.append(Evaluation(weights, event["records"], event["metrics"]))
            on_event(rank, event)

        ranks.run(RANK, config, where, take)
    return found if where.is_chief else None


def evaluate_beside(
    config: dict[str, Any], where: Where, progress: Progress, *, overwrite: bool
) -> None:
    """Evaluates each new checkpoint of a training that other processes run, until it has ended.

    That is the evaluator of a TF_CONFIG, as Kubeflow's TFJob starts one beside a training, with the
    training's command. It takes no part in it.

    Args:
        config: of the training.
        where: of the training; its deadlines are those of the evaluator.
        overwrite: whether the training is to replace an earlier one, which is not evaluated.

    Raises:
        OptionError: the training writes into a bucket.
        TfdistError: nothing to evaluate on, or no checkpoint for too long.
    """
    if url_of(config["output"]) is not None:
        raise OptionError(
            "the output of a training that has an evaluator must be a folder that both see",
            received=config["output"],
            mend="Name a folder on a volume that they share, or leave the evaluator out",
        )
    alone = Where(
        strategy="single",
        options={},
        workers=1,  # Without the TF_CONFIG, whose cluster the evaluator is not in.
        start_timeout_s=where.start_timeout_s,
        stall_timeout_s=where.stall_timeout_s,
    )
    of_rank = config | {"overwrite": overwrite}
    ranks.run("tfdist.runs.evaluate_rank", of_rank, alone, progress.take)
