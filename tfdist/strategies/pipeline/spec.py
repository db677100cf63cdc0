"""What strategy "pipeline" is, for all that never import its engine."""

from __future__ import annotations

from tfdist.strategies.spec import Spec

SPEC = Spec(
    name="pipeline",
    path="tfdist.strategies.pipeline.strategy:Pipeline",
    summary="layers in stages on several devices, microbatches through them; in one process, or on "
    "each rank of horovod or multi_worker",
    divides_model=True,
    engine="tensorflow",
    example={"stages": 2, "microbatches": 4},
)
