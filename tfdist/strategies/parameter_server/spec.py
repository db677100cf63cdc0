"""What strategy "parameter_server" is, for all that never import its engine."""

from __future__ import annotations

from tfdist.strategies.spec import Spec

SPEC = Spec(
    name="parameter_server",
    path="tfdist.strategies.parameter_server.strategy:ParameterServer",
    summary="weights on parameter servers, workers that do not wait for each other: asynchronous",
    launchers=("tasks",),
    has_servers=True,
    is_asynchronous=True,
    engine="parameter-server",
    sagemaker="parameter_server",
)
