"""Which epoch is the best."""

from __future__ import annotations

import numpy as np

from tfdist.training.checkpoints.best_model import BestModel


def test_a_metric_of_one_value_is_a_number():
    saved = []
    best = BestModel("f1_score", "max", save=saved.append, from_chief=lambda value: value)
    best.set_model("model")
    for epoch, value in enumerate((0.5, 0.25, 0.75)):
        best.on_epoch_end(epoch, {"f1_score": np.array([value])})
    assert (best.best, best.best_epoch, saved) == (0.75, 3, ["model"] * 2)
