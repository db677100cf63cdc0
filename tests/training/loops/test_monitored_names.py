"""What a training watches must be one number of it."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import OptionError
from tfdist.training.loops.monitored_names import Watched

LOGS = {"loss": 0.5, "recall": np.array([0.1, 0.2, 0.3])}


@pytest.mark.parametrize("monitor", ["recall", "val_recall"])
def test_a_metric_of_several_values_is_not_watched(monitor):
    seen = LOGS | {f"val_{name}": value for name, value in LOGS.items()}
    with pytest.raises(OptionError, match=f"save_best must watch one number.*'{monitor}'.*3 val"):
        Watched({"save_best": monitor}, may_gain=False).on_epoch_end(0, seen)
    for one in (0.5, np.array([0.5])):  # As F1Score of one output gives it.
        Watched({"save_best": "loss"}, may_gain=False).on_epoch_end(0, seen | {"loss": one})
