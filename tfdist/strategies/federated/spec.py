"""What strategy "federated" is, for all that never import its engine."""

from __future__ import annotations

from tfdist.strategies.spec import Spec

SPEC = Spec(
    name="federated",
    path="tfdist.strategies.federated.strategy:Federated",
    summary="clients train on their own records, a server averages (TensorFlow Federated), "
    "simulated",
    engine="tensorflow-federated",
    example={"clients_per_round": 2},
)
