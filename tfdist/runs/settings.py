"""What a training is asked for, however it was asked: options of a command, or of a call."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfdist.errors import OptionError
from tfdist.runs import monitors
from tfdist.training.checkpoints import init_weights
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count, check_seed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All but model, data, output, and the processes; ``tfdist.train`` says what each means."""

    epochs: int = 5
    global_batch_size: int = 128
    seed: int = 0
    init_weights: str | None = None
    lr: float | None = None
    augment: str | Sequence[str] | None = None
    pad_to: int | str | None = None
    bucket_by_length: bool | Sequence[int] = False
    class_weight: str | Mapping[Any, float] | None = None
    early_stopping: str | Mapping[str, Any] | None = None
    save_best: str | Mapping[str, Any] | None = None
    callbacks: str | Callable[[], Any] | None = None
    limit_steps: int | None = None
    tensorboard: str | None = None
    mlflow: str | None = None
    wandb: str | None = None
    metrics_file: str | None = None
    profile: str | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    stop_on_nan: bool = True

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

        for option in ("epochs", "global_batch_size", "keep", "checkpoint_every", "limit_steps"):
            if getattr(self, option) is not None:
                check_count(option, getattr(self, option))
        check_seed(self.seed)
        for option in ("tensorboard", "profile"):
            if getattr(self, option) is not None:
                _check_writable(option, getattr(self, option))
        if self.init_weights is not None:
            init_weights.check(self.init_weights)
        padding = padding_of(self.pad_to, self.bucket_by_length)
        buckets = None
        if padding is not None and padding.buckets is not None:
            buckets = list(padding.buckets) or True
        stopping, best = self.early_stopping, self.save_best
        for option, parsed in (
            ("early_stopping", stopping := stopping and monitors.early_stopping(stopping)),
            ("save_best", best := best and monitors.save_best(best)),
        ):
            if parsed and parsed["monitor"].startswith("val_") and "validation" not in splits:
                raise OptionError(
                    f"{option} must name a number of the training, where there is no validation",
                    received=parsed["monitor"],
                    mend="Give data with the split validation, or watch the training: "
                    f"{parsed['monitor'].removeprefix('val_')}",
                )
        if self.mlflow and urlsplit(self.mlflow).password:
            raise OptionError(
                "mlflow must be a URI without a password, which files and processes would show",
                received=f"one for {urlsplit(self.mlflow).hostname}",
                mend="Set MLFLOW_TRACKING_URI in the environment and give --mlflow alone",
            )
        return {
            "epochs": self.epochs,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "init_weights": self.init_weights,
            "lr": None if self.lr is None else _rate(self.lr),
            "augment": None if self.augment is None else ",".join(parse_presets(self.augment)),
            "pad_to": self.pad_to,
            "bucket_by_length": buckets,
            "class_weight": self.class_weight and class_weights(self.class_weight, splits["train"]),
            "early_stopping": stopping or None,
            "save_best": best or None,
            "callbacks": self.callbacks and model_path.of(self.callbacks, model_path.CALLBACKS),
            "limit_steps": self.limit_steps,
            "tensorboard": self.tensorboard,
            "mlflow": self.mlflow,
            "wandb": self.wandb,
            "metrics_file": self.metrics_file,
            "profile": self.profile,
            "checkpoint_every": self.checkpoint_every,
            "keep": self.keep,
            "stop_on_nan": self.stop_on_nan,
        }


def _check_writable(option: str, folder: str) -> None:
    """Raises:
    OptionError: nothing can be written there, which would end the training in its first step.
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
            f"{option} must be a folder that can be written",
            received=f"{folder}: {error.strerror}",
            mend="Choose another folder",
        ) from None


def _rate(lr: object) -> float:
    if not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise OptionError("lr must be a number above 0", received=repr(lr))
    return float(lr)
