"""AutoGraph for what a user has written, where the code around it is graph-safe as it stands."""

from __future__ import annotations

from collections.abc import Callable

from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api


def with_autograph(function: Callable) -> Callable:
    """Returns ``function`` as Keras' own train function would call it: a user may write ``if``."""
    return api.tf_convert(function, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))
