"""What strategy "pipeline" is, for all that never import its engine."""

from __future__ import annotations

from tfdist.strategies.spec import Spec

SPEC = Spec(
    name="pipeline",
    path="tfdist.strategies.pipeline.strategy:Pipeline",
    summary="layers in stages on several devices, microbatches through them; in one process, or on "
    "each rank of horovod",
    divides_model=True,
    engine="tensorflow",
)
