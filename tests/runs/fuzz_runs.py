"""What reads the folder of a training, for tests/fuzzing.py: settings, history and checkpoints."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import mutations
from fuzzing import Target, Wrong

from tfdist.runs import files
from tfdist.runs.curves import draw
from tfdist.runs.folder import RunFolder
from tfdist.runs.settings import Start

_CONFIG = {
    "model": "model.py:model_fn",
    "data": "data",
    "splits": {"train": "data/train", "validation": "data/validation"},
    "strategy": "single",
    "options": {"lr_scaling": "linear"},
    "workers": None,
    "output": "run",
    "working_folder": "/work",
    "resume": False,
    "epochs": 3,
    "global_batch_size": 64,
    "seed": 0,
    "checkpoint_every": None,
    "keep": 3,
    "stop_on_nan": True,
}
_ROWS = [
    {
        "epoch": epoch,
        "loss": 1 / epoch,
        "accuracy": 0.5,
        "val_loss": 0.25,
        "learning_rate": 0.1,
        "seconds": 1.5,
        "samples_per_s": 100.0,
    }
    for epoch in (1, 2, 3)
]
# Of a fit of three epochs of two steps, with a checkpoint after each epoch.
_STEPS, _EPOCHS = 2, 3


def targets(folder: Path) -> list[Target]:
    run = RunFolder(folder / "run")
    with run.taken(_CONFIG):
        files.write_history(run.history, _ROWS)
    weights = _train(folder / "checkpoints")
    newest = _EPOCHS * _STEPS
    data = folder / "checkpoints" / f"ckpt-{newest}.data-00000-of-00001"
    damages = (*mutations.BYTES, *mutations.PLACES)
    listed = (*mutations.TEXT, *mutations.BYTES, *mutations.PLACES)
    resume = functools.partial(_resume, folder / "checkpoints", weights)
    index = data.with_name(f"ckpt-{newest}.index")
    json_damages = (*mutations.JSON, *mutations.JSON, *damages)
    again, drawn = functools.partial(_again, run), functools.partial(_drawn, run)
    found = [
        ("config.json, resume", run.config, json_damages, again),
        ("history.csv, curves", run.history, (*mutations.TEXT, *listed), drawn),
        ("checkpoint, data", data, damages, resume),
        ("checkpoint, index", index, damages, resume),
        ("checkpoint, list", data.with_name("checkpoint"), listed, resume),
    ]
    return [
        Target(kind=kind, file=file, mutations=changes, use=use)
        for kind, file, changes, use in found
    ]


def _again(run: RunFolder) -> None:
    with run.taken(_CONFIG, Start(resume=True)):
        pass
    if json.loads(run.config.read_text()) != _CONFIG:
        raise Wrong("another training goes on")


def _drawn(run: RunFolder) -> None:
    rows = files.read_rows(run.history)
    if rows:
        draw(run, "history", ["loss"])
    files.write_history(run.history, rows)


def _model():
    import tensorflow as tf

    tf.keras.utils.set_random_seed(5)
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _fit(folder: Path, epochs: int, resume: bool):
    import numpy as np

    from tfdist.strategies import strategy
    from tfdist.training.checkpoints.checkpoint import Checkpoints

    alone = strategy("single")
    model = alone.build(_model)
    x = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
    feed = alone.dataset((x, x[:, :1]), global_batch_size=2)
    keep = Checkpoints(folder, resume=resume)
    model.fit(feed, epochs=epochs, callbacks=[keep], verbose=0)
    return model


def _train(folder: Path) -> list:
    return _fit(folder, _EPOCHS, resume=False).get_weights()


def _resume(folder: Path, weights: list) -> None:
    """From whichever checkpoint is sound: the weights are those of the unbroken fit."""
    import numpy as np

    found = _fit(folder, _EPOCHS, resume=True).get_weights()
    if not all(map(np.array_equal, found, weights)):
        raise Wrong("other weights")
