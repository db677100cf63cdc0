"""The evaluator of a TF_CONFIG, as Kubeflow's TFJob starts one beside a training.

Its command is that of the training. It takes no part in it: it evaluates each new checkpoint in the
training's folder, and ends with the training.
"""

from __future__ import annotations

from typing import Any

from tfdist.errors import OptionError
from tfdist.launch.jobs import Where
from tfdist.records.buckets.urls import url_of
from tfdist.runs import ranks
from tfdist.runs.progress import Progress

RANK = "tfdist.runs.evaluate_rank"


def evaluate_beside(config: dict[str, Any], where: Where, progress: Progress) -> None:
    """Evaluates the checkpoints of a training that other processes run, until it has ended.

    Args:
        config: of the training.
        where: of the training; its deadlines are those of the evaluator.

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
    ranks.run(RANK, config, alone, progress.take)
