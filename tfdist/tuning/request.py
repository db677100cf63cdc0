"""What a search is asked for, and what each of its trials is then asked for."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError, spelt
from tfdist.launch.jobs import Where
from tfdist.runs import monitors
from tfdist.runs.class_weights import readable_again
from tfdist.runs.settings import Settings
from tfdist.runs.training import find_splits, training_config
from tfdist.traces import wish
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_values, option
from tfdist.tuning.space import Space
from tfdist.tuning.study import PRUNERS

PLACES = ("here", "ray")

_LOGS = [each.name for each in dataclasses.fields(Settings) if each.metadata["in_job"] == "logs"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How is searched; ``tfdist.tune`` says what each means."""

    trials: int = option(20, "Trials in all, with those before --resume.", least=1)
    parallel: int = option(
        1, "Trials at a time; each has its part of the cores, or of the GPUs.", least=1
    )
    on: str = option(
        "here",
        "Where trials run. here: on this machine. ray: on a Ray cluster, that at RAY_ADDRESS, else "
        "one of this machine; the search must lie on a file system that all nodes share.",
        choices=PLACES,
    )
    metric: str = option(
        "val_loss",
        "What is compared: its value after the last epoch of a trial. Of a number that can be "
        "better either way NAME,mode=max or mode=min.",
        metavar="NAME",
        same_on_resume=True,
    )
    pruner: str = option(
        "halving",
        "Which trials end early. halving: after GRACE, GRACE x REDUCTION, ... epochs all but the "
        "best of those that came so far. median: after GRACE, 2 x GRACE, ... epochs those worse "
        "than the median of the trials that came to their end. none: all train to the end.",
        choices=PRUNERS,
        same_on_resume=True,
    )
    grace: int = option(
        1,
        "Epochs before a trial may end early; as many as --epochs: none does.",
        metavar="EPOCHS",
        least=1,
        same_on_resume=True,
    )
    reduction: int = option(
        3,
        "Of halving: one trial in so many goes on.",
        metavar="N",
        least=2,
        same_on_resume=True,
    )
    folds: int | None = option(
        None,
        "Cross-validation: a trial trains K times, each time validating on other shards of the "
        "split train; its value is the mean.",
        metavar="K",
        least=2,
        same_on_resume=True,
    )


_SAME = [
    each.name
    for table in (Search, Settings)
    for each in dataclasses.fields(table)
    if each.metadata["same_on_resume"]
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A search.

    Attributes:
        model: as ``model_path`` names it; its function takes the arguments that are chosen.
        space: what they are chosen from; None: the function takes a trial of Optuna's.
        max_restarts: of each training.
    """

    model: str
    data: str
    output: Path
    space: Space | None
    search: Search
    settings: Settings
    where: Where
    max_restarts: int = 0

    @property
    def rungs(self) -> list[int]:
        """The epochs after which is decided who goes on, and the last epoch."""
        grace, last = self.search.grace, self.settings.epochs
        if self.search.pruner == "none":
            return [last]
        if self.search.pruner == "median":
            return [*range(grace, last, grace), last]
        found, epoch = [], grace
        while epoch < last:
            found.append(epoch)
            epoch *= self.search.reduction
        return [*found, last]

    @property
    def monitor(self) -> dict[str, str]:
        """{"monitor": name, "mode": "min" or "max"}."""
        return monitors.watched("metric", self.search.metric)

    def check(self) -> dict[str, Any]:
        """Returns what must be the same where it is gone on with: JSON-able.

        Raises:
            TfdistError: something that cannot hold, in whatever trial.
        """
        check_values(self.search)
        name = self.monitor["monitor"]
        splits = find_splits(self.data)
        if name.startswith("val_") and self.search.folds is None and "validation" not in splits:
            raise OptionError(
                "metric must name a number of the training, where there is no validation",
                received=name,
                mend=f"Give data with the split validation, or {spelt('folds', 5)}",
            )
        if self.where.place is not None:
            raise OptionError(
                "a search must start the processes of its trials itself",
                received=f"one of several that {self.where.place.launcher} has started",
                mend="Start it once, without srun or mpirun",
            )
        if self.where.hosts is not None and self.search.on == "ray":
            raise OptionError(
                "a trial on Ray must have its processes on the node that Ray gives it",
                received=f"{spelt('on', 'ray')} with {spelt('hosts', self.where.hosts)}",
                mend=f"Leave {spelt('hosts')} out",
            )
        if self.where.hosts is not None and self.search.parallel > 1:
            raise OptionError(
                "trials on other hosts must run one after the other",
                received=f"{spelt('parallel', self.search.parallel)} with {self.where.hosts}",
                mend=f"Leave {spelt('parallel')} out",
            )
        if self.settings.metrics_file is not None:
            raise OptionError(
                "metrics_file must be of one training",
                received="one for all trials of a search",
                mend="Leave it out: trials.csv has the numbers of all",
            )
        of_space = {} if self.space is None else self.space.train
        ends = max((len(each.ends) for each in of_space.values()), default=1)
        for number in range(ends):
            chosen = {name: each.ends[number % len(each.ends)] for name, each in of_space.items()}
            config = self.training(0, {}, chosen, self.data, self.output, self.settings.epochs)
            self.options_of_train({}, chosen)
        same = {name: vars(self.search)[name] for name in _SAME if name in vars(self.search)}
        same |= {name: config[name] for name in _SAME if name in config and name not in of_space}
        kept = ("epochs", "data", "records", "working_folder")
        space = self.space and dataclasses.asdict(self.space)
        every = {"model": self.model, "space": space, **{k: config[k] for k in kept}, **same}
        return json.loads(json.dumps(every))  # As it is read again: with lists for tuples.

    def training(
        self,
        number: int,
        of_model: Mapping[str, Any],
        of_training: Mapping[str, Any],
        data: str,
        output: Path,
        epochs: int,
    ) -> dict[str, Any]:
        """Returns the configuration of a training of trial ``number``, see ``training_config``."""
        is_fold = data != self.data
        trial = f"{number:03d}/{output.name}" if is_fold else f"{number:03d}"
        logs = {
            name: _of_trial(name, given, trial)
            for name in _LOGS
            if (given := getattr(self.settings, name)) is not None
        }
        settings = replace(self.settings, **{**logs, **of_training, "epochs": epochs})
        if is_fold and settings.class_weight is not None:
            # Of the whole split: nothing counts the classes of a fold.
            of_all = readable_again(settings.class_weight, find_splits(self.data)["train"])
            settings = replace(settings, class_weight=of_all)
        config = training_config(
            self.where,
            model=model_path.with_arguments(self.model, of_model) if of_model else self.model,
            data=data,
            output=output,
            settings=settings,
            resume=True,
            validates=self.search.folds is not None,
        )
        config["splits"].pop("test", None)  # It is for the model that is chosen in the end.
        return config

    def options_of_train(
        self, of_model: Mapping[str, Any], of_training: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns what ``tfdist train --config`` reads to train a trial's model in full.

        Raises:
            OptionError: something that it cannot read.
        """
        splits = find_splits(self.data)
        split = splits["train"]
        settings = replace(self.settings, **of_training)
        if "validation" not in splits:  # That only the folds have.
            settings = replace(settings, **dict.fromkeys(settings.of_validation(), None))
        found = {
            "model": model_path.with_arguments(self.model, of_model),
            "data": self.data,
            "epochs": settings.epochs,
        }
        for table in (self.where, settings):
            for each in dataclasses.fields(table):
                value = getattr(table, each.name)
                if each.name != "options" and value != each.default:
                    key = each.name.removesuffix("_s").replace("_", "-")
                    found[key] = _as_read(each.name, value, split)
        if self.where.options:
            found["option"] = [f"{name}={value}" for name, value in self.where.options.items()]
        return found


def _of_trial(option: str, given: str, trial: str) -> str:
    """Returns where a trial writes its logs; steps that are traced are in its run folder anyway."""
    if option != "profile":
        return os.path.join(given, trial)
    asked = wish.parsed(given)
    if asked.folder is None:
        return given
    return str(replace(asked, folder=os.path.join(asked.folder, trial)))


def _as_read(name: str, value: Any, split: str) -> Any:
    """Returns the value of a setting of ``tfdist.train`` as its command takes it.

    Args:
        name: of the field of ``Settings``.
        split: the shards that are trained on, which name classes.

    Raises:
        OptionError: the command cannot take it.
    """
    if name == "bucket_by_length" and not isinstance(value, bool):
        raise OptionError(
            "bucket_by_length of a search must be True, as tfdist train, which is to read "
            "best.yaml, takes no bounds",
            received=value,
            mend="Write bucket_by_length=True, which has the most alike lengths share a batch",
        )
    if name == "augment" and not isinstance(value, str):
        return ",".join(value)
    if name == "callbacks":
        return model_path.of(value, model_path.CALLBACKS)
    if not isinstance(value, Mapping):
        return value
    if name == "class_weight":
        return readable_again(value, split)
    parts = monitors.watched(name, value)
    return ",".join([parts.pop("monitor"), *(f"{key}={one}" for key, one in parts.items())])
