"""AutoGraph for what a user has written, where the code around it is graph-safe as it stands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api


def with_autograph(function: Callable) -> Callable:
    """Returns ``function`` as Keras' own train function would call it: a user may write ``if``."""
    return api.tf_convert(function, for_layers())


def for_layers() -> contextlib.AbstractContextManager:
    """Encloses code that stays as it is, whose layers Keras converts."""
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
