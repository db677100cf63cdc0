"""The options of ``tfdist train``, by theme; what they set stands in ``runs.settings``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from tfdist.cli import completion
from tfdist.cli.process_options import max_restarts_option, seed_option

_Decorator = Callable[[Callable], Callable]


def _together(*options: _Decorator) -> _Decorator:
    """Returns a decorator that adds all options, the first one first in --help."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _length(context: click.Context, option: click.Parameter, text: str | None) -> str | int | None:
    return int(text) if text and text.isdecimal() else text


of_data = _together(
    click.option(
        "--data",
        required=True,
        metavar="DIR",
        shell_complete=completion.data,
        help="Shards written by tfdist shard: trains on the split train, validates on validation "
        "and ends with test, where they are there. DIR/SPLIT trains on that split alone.",
    ),
    click.option(
        "--augment",
        metavar="NAMES",
        help="Change the images that are trained on at random, anew in each epoch: flip, crop, "
        "color, or several with commas. Validation and test see them as they are.",
    ),
    click.option(
        "--pad-to",
        metavar="batch|N",
        callback=_length,
        help="Pad features of variable length to the longest record of each global batch, or to a "
        "multiple of N, instead of all to one length.",
    ),
    click.option(
        "--bucket-by-length",
        is_flag=True,
        help="With --pad-to: train on batches of records of similar lengths.",
    ),
    click.option(
        "--class-weight",
        metavar="balanced|0=1.0,1=2.0|FILE",
        help="What the records of each class count in the loss: written out, in a JSON file, or "
        "balanced, with which each class counts alike.",
    ),
)

of_learning = _together(
    click.option("--epochs", type=click.IntRange(min=1), default=5, show_default=True),
    click.option(
        "--global-batch-size",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Records in one step, over all replicas.",
    ),
    click.option(
        "--init-weights",
        metavar="FILE",
        help="Begin with the weights of this file, .keras or .weights.h5, of an earlier training.",
    ),
    click.option(
        "--lr",
        type=click.FloatRange(min=0, min_open=True),
        metavar="RATE",
        help="The learning rate, in place of the one that the model was compiled with.",
    ),
    seed_option,
    click.option(
        "--limit-steps",
        type=click.IntRange(min=1),
        metavar="N",
        help="A dry run: N steps of each epoch, of validation and of the test; the last of them on "
        "a third of a batch, as an epoch may end.",
    ),
)

of_watching = _together(
    click.option(
        "--early-stopping",
        metavar="NAME,patience=N,...",
        help="End the training when a number such as val_loss has not become better for so many "
        "epochs. Also: min_delta, mode, baseline, start_from_epoch, restore_best_weights.",
    ),
    click.option(
        "--save-best",
        metavar="NAME",
        help="Write the model of the best epoch by a number such as val_accuracy to best.keras.",
    ),
    click.option(
        "--callbacks",
        metavar="FILE.py:NAME",
        help="A function that returns a list of Keras callbacks; every rank calls it.",
    ),
    click.option(
        "--stop-on-nan/--no-stop-on-nan",
        default=True,
        show_default=True,
        help="End with exit code 1 after an epoch whose loss is no finite number.",
    ),
)

of_trackers = _together(
    click.option("--tensorboard", metavar="DIR", help="Write logs for TensorBoard there."),
    click.option(
        "--mlflow",
        is_flag=False,
        flag_value="",
        metavar="[URI]",
        help="Tell MLflow, at this tracking URI; alone, at the one that MLflow itself knows.",
    ),
    click.option(
        "--wandb",
        is_flag=False,
        flag_value="",
        metavar="[PROJECT]",
        help="Tell Weights & Biases.  [default project: tfdist, or WANDB_PROJECT]",
    ),
    click.option(
        "--metrics-file",
        metavar="FILE.prom",
        help="Keep the newest numbers in this file, in Prometheus' text format.",
    ),
    click.option(
        "--profile",
        metavar="DIR",
        help="Write a trace of five steps of rank 0 there, for TensorBoard's page Profile.",
    ),
)

of_output = _together(
    click.option(
        "--output",
        required=True,
        type=click.Path(path_type=Path),
        help="Folder for the results, or a place in a bucket, such as s3://BUCKET/RUN, to which "
        "checkpoints are taken as soon as they are complete.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(min=1),
        metavar="STEPS",
        help="Also write checkpoints within epochs.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        help="Checkpoints to keep.",
    ),
    max_restarts_option,
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output."),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace an earlier training in --output, when the first epoch has ended; nothing "
        "else there is touched.",
    ),
)
