"""What is served: the function of a model, its weights, and what it was trained on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, OptionError
from tfdist.records.buckets.urls import url_of
from tfdist.records.format.manifest import load_manifest
from tfdist.records.format.schema import Schema
from tfdist.records.writing.instances import as_asked
from tfdist.runs import evaluating
from tfdist.runs.folder import RunFolder
from tfdist.runs.predicting import training_data


@dataclass(frozen=True)
class Served:
    """A model with its weights, as another process makes it.

    Attributes:
        name: of the model, in addresses.
        model: as ``--model`` takes it.
        file: what its user named: a file that Keras wrote.
        weights: that file, or the copy of it that is read.
        schema: the inputs, as requests hold them.
        trained_on: the shards of the training; None where they are not here.
        classes: of the only label, their names in the order of their numbers.
    """

    name: str
    model: str
    file: Path
    weights: Path
    schema: Schema
    trained_on: str | None
    classes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        told = {"schema": self.schema.to_json(), "classes": list(self.classes)}
        return {**vars(self), "file": str(self.file), "weights": str(self.weights), **told}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Served:
        schema, classes = Schema.from_json(value["schema"]), tuple(value["classes"])
        files = {name: Path(value[name]) for name in ("file", "weights")}
        return cls(**{**value, **files, "schema": schema, "classes": classes})

    def told(self, error: Exception) -> str:
        """Returns what an error says, in one line and of the file that the user knows."""
        text = str(error) or repr(error)
        return " ".join(text.replace(str(self.weights), str(self.file)).split())


def newest(source: Path) -> Path | None:
    """Returns the best model of a run folder, else the last one; a file as it is; None: no file."""
    run = RunFolder(source)
    # Of the folder itself: what is to replace an earlier training stands within it until then.
    names = (run.best_model.name, run.model.name)
    files = (source, *(source / name for name in names))
    return next((file for file in files if file.is_file()), None)


def find(
    source: Path, *, model: str | None = None, trained_on: str | None = None, name: str | None
) -> Served:
    """Returns what a run folder, or a file that Keras wrote, holds.

    Args:
        source: the output of ``tfdist train``, whose best model it is, or a saved model.
        model: the function that makes the model; None: that which config.json names.
        trained_on: the shards of the training; None: those that config.json names.
        name: of the model, in addresses; None: that of the source.

    Raises:
        OptionError: there is no model, or no function for it: see ``evaluating.find``.
        DataError: nothing tells what the model takes.
    """
    try:
        file = newest(source) or source
    except OSError as error:
        raise OptionError(
            "what is served must be a run folder or a file that can be read",
            received=f"{source}: {error.strerror}",
            mend="Let this user read it: `chmod`",
        ) from None
    (trained,) = evaluating.find([os.fspath(file)], model)
    weights = trained.weights
    name = name or (source if source.is_dir() else source.with_suffix("")).resolve().name
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name, re.ASCII):
        raise OptionError(
            "the name of a model must be ASCII letters, digits, '-', '_' and '.'",
            received=repr(name),
            mend="Give another one: --name NAME",
        )
    training = training_data(weights, trained_on)
    if training is None:
        raise DataError(
            "what a model takes must be told by the shards of its training",
            received="no config.json beside the weights that names such shards here",
            mend="Name them: --trained-on DIR",
        )
    manifest = load_manifest(training)
    label = manifest.schema.class_label
    return Served(
        name=name,
        model=trained.model,
        file=weights.absolute(),
        weights=weights.absolute(),
        schema=as_asked(manifest.schema.of_role("input"), is_adopted=manifest.is_adopted),
        trained_on=url_of(training) or os.path.abspath(training),
        classes=() if label is None else label.classes or (),
    )
