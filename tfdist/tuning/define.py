"""A process that calls a model's function with a trial of Optuna's: what it suggests is chosen.

Run as ``python -m tfdist.tuning.define REQUEST``. The processes that train are given the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.compat import import_tensorflow
from tfdist.errors import ModelError
from tfdist.training.engine import model_path
from tfdist.tuning.study import DEFINED, Study
from tfdist.tuning.trial import main


def _define(request: dict[str, Any], tell: Callable[..., None]) -> None:
    import_tensorflow()
    study = Study(Path(request["journal"]), **request["study"])
    trial = study.trial(request["number"])
    function = model_path.load(request["model"])
    try:
        function(trial=trial)
    except TypeError as error:
        if model_path.TRIAL not in str(error):
            raise
        raise ModelError(
            "the model's function must take a trial where no space is given",
            received=str(error),
            mend="Write def model_fn(trial): ..., or give a space with its arguments",
        ) from None
    trial.set_user_attr(DEFINED, True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(_define)
