"""What a training can be asked for, by a command, a call or a job: one table, and its use."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfdist.errors import OptionError, spelt
from tfdist.runs import monitors
from tfdist.traces import wish
from tfdist.training.checkpoints import init_weights
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_seed, check_values, option, picked

#: What a search may choose of a training, here and on SageMaker.
SEARCHED = ("lr", "global_batch_size", "seed", "augment", "class_weight", "pad_to")


@dataclass(frozen=True, kw_only=True)
class OfData:
    """How records are read, and what they count."""

    augment: str | Sequence[str] | None = option(
        None,
        "Change the images that are trained on at random, anew in each epoch: flip, crop, "
        "color, or several with commas. Validation and test see them as they are.",
        metavar="NAMES",
        same_on_resume=True,
    )
    pad_to: int | str | None = option(
        None,
        "Pad features of variable length to the longest record of each global batch, or to a "
        "multiple of N, instead of all to one length.",
        metavar="batch|N",
        same_on_resume=True,
    )
    bucket_by_length: bool | Sequence[int] = option(
        False,
        "With --pad-to: train on batches of records of similar lengths.",
        same_on_resume=True,
    )
    class_weight: str | Mapping[Any, float] | None = option(
        None,
        "What the records of each class count in the loss: written out, in a JSON file, or "
        "balanced, with which each class counts alike.",
        metavar="balanced|0=1.0,1=2.0|FILE",
        same_on_resume=True,
    )


@dataclass(frozen=True, kw_only=True)
class OfOutput:
    """What is kept while it trains."""

    checkpoint_every: int | None = option(
        None, "Also write checkpoints within epochs.", metavar="STEPS", least=1
    )
    keep: int = option(3, "Checkpoints to keep.", least=1)


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a training begins, and begins again; of a call alone, whose results do not tell."""

    max_restarts: int = option(
        0,
        "When a process is lost: end all, start all again, and go on from the last checkpoint.",
        metavar="R",
        least=0,
    )
    resume: bool = option(False, "Go on from the last checkpoint in --output.")
    rescale: bool = option(
        False,
        "With --resume, at the end of an epoch: the epochs to come may have another "
        "--global-batch-size. The learning rate stays.",
    )
    overwrite: bool = option(
        False,
        "Replace an earlier training in --output, when the first epoch has ended; nothing "
        "else there is touched.",
    )


@dataclass(frozen=True, kw_only=True)
class OfLearning:
    """From what it begins, and how far it goes."""

    epochs: int = option(5, least=1)
    global_batch_size: int = option(
        128, "Records in one step, over all replicas.", least=1, same_on_resume=True
    )
    init_weights: str | None = option(
        None,
        "Begin with the weights of this file, .keras or .weights.h5, of an earlier training.",
        metavar="FILE",
        same_on_resume=True,
        in_job="channel",
    )
    lr: float | None = option(
        None,
        "The learning rate, in place of the one that the model was compiled with.",
        metavar="RATE",
        same_on_resume=True,
    )
    seed: int = option(0, "Of weights and order.", same_on_resume=True)
    limit_steps: int | None = option(
        None,
        "A dry run: N steps of each epoch, of validation and of the test; the last of them on "
        "a third of a batch, as an epoch may end.",
        metavar="N",
        least=1,
        same_on_resume=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settings(OfLearning, OfOutput, OfData):
    """All but model, data, output, and the processes; ``tfdist.train`` says what each means."""

    early_stopping: str | Mapping[str, Any] | None = option(
        None,
        "End the training when a number such as val_loss has not become better for so many "
        "epochs. Also: min_delta, mode, baseline, start_from_epoch, restore_best_weights.",
        metavar="NAME,patience=N,...",
    )
    save_best: str | Mapping[str, Any] | None = option(
        None,
        "Write the model of the best epoch by a number such as val_accuracy to best.keras.",
        metavar="NAME",
        same_on_resume=True,
    )
    callbacks: str | Callable[[], Any] | None = option(  # noqa: RUF009
        None,
        "A function that returns a list of Keras callbacks; every rank calls it.",
        metavar="FILE.py:NAME",
        in_job="code",
    )
    stop_on_nan: bool = option(
        True, "End with exit code 1 after an epoch whose loss is no finite number."
    )
    tensorboard: str | None = option(
        None, "Write logs for TensorBoard there.", metavar="DIR", in_job="logs"
    )
    mlflow: str | None = option(
        None,
        "Tell MLflow, at this tracking URI; alone, at the one that MLflow itself knows.",
        metavar="[URI]",
        alone="",
    )
    wandb: str | None = option(
        None,
        "Tell Weights & Biases.  [default project: tfdist, or WANDB_PROJECT]",
        metavar="[PROJECT]",
        alone="",
    )
    metrics_file: str | None = option(
        None,
        "Keep the newest numbers in this file, in Prometheus' text format.",
        metavar="FILE.prom",
        in_job="never",
    )
    profile: str | None = option(
        None,
        "Write a trace of five steps of rank 0 there, for TensorBoard's page Profile; with steps, "
        "of these on every rank, in --output if not in DIR, for tfdist trace.",
        metavar="DIR|[DIR,]steps=A:B",
        in_job="logs",
    )

    def of_validation(self) -> dict[str, str]:
        """Returns what watches a number of the validation: the option -> that number."""
        return {
            name: parsed["monitor"]
            for name, parsed in self._watched().items()
            if parsed is not None and parsed["monitor"].startswith("val_")
        }

    def _watched(self) -> dict[str, dict[str, Any] | None]:
        given = {"early_stopping": self.early_stopping, "save_best": self.save_best}
        return {name: monitors.watched(name, one) if one else None for name, one in given.items()}

    def to_config(self, splits: Mapping[str, str]) -> dict[str, Any]:
        """Returns what ranks read: JSON-able.

        Args:
            splits: "train", and perhaps others -> source.

        Raises:
            TfdistError: something that cannot hold.
        """
        from tfdist.records.format.pad_to import padding_of
        from tfdist.records.reading.augmentation import parse_presets
        from tfdist.runs.class_weights import class_weights

        check_seed(self.seed)
        check_values(self)
        traced = self.profile and wish.parsed(self.profile).folder
        for name, folder in (("tensorboard", self.tensorboard), ("profile", traced)):
            if folder is not None:
                _check_writable(name, folder)
        if self.init_weights is not None:
            init_weights.check(self.init_weights)
        padding = padding_of(self.pad_to, self.bucket_by_length)
        buckets = None
        if padding is not None and padding.buckets is not None:
            buckets = list(padding.buckets) or True
        if "validation" not in splits:
            for name, monitor in self.of_validation().items():
                raise OptionError(
                    f"{name} must name a number of the training, where there is no validation",
                    received=monitor,
                    mend="Give data with the split validation, or watch the training: "
                    f"{monitor.removeprefix('val_')}",
                )
        if self.mlflow and urlsplit(self.mlflow).password:
            raise OptionError(
                "mlflow must be a URI without a password, which files and processes would show",
                received=f"one for {urlsplit(self.mlflow).hostname}",
                mend="Set MLFLOW_TRACKING_URI in the environment and give --mlflow alone",
            )
        return picked(Settings, vars(self)) | {
            "lr": None if self.lr is None else _above_0(self.lr),
            "augment": None if self.augment is None else ",".join(parse_presets(self.augment)),
            "bucket_by_length": buckets,
            "class_weight": self.class_weight and class_weights(self.class_weight, splits["train"]),
            **self._watched(),
            "callbacks": self.callbacks and model_path.of(self.callbacks, model_path.CALLBACKS),
        }


def _check_writable(name: str, folder: str) -> None:
    """Checks that something can be written there: else a training would end in its first step.

    Raises:
        OptionError: nothing can.
    """
    if "://" in folder:
        return
    path = Path(folder).absolute()
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OptionError(
            f"{name} must be a folder that can be written",
            received=f"{folder}: {error.strerror}",
            mend="Choose another folder",
        ) from None


def _above_0(lr: float) -> float:
    if not 0 < lr < math.inf:
        raise OptionError(
            "lr must be a number above 0",
            received=repr(lr),
            mend=f"Choose one, such as {spelt('lr', 0.001)}",
        )
    return float(lr)
