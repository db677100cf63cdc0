"""best.yaml: the options of a training as ``tfdist train --config`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.errors import OptionError
from tfdist.runs import monitors
from tfdist.runs.class_weights import readable_again
from tfdist.training.engine import model_path


def as_read(name: str, value: Any, split: str) -> Any:
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
