"""The strategy that fits where a program finds itself."""

from __future__ import annotations

from tfdist import topology
from tfdist.strategies.registry import names_of


def choose() -> tuple[str, str]:
    """Returns the name of a strategy and the reason for it."""
    place = topology.current()
    if of_launcher := names_of(lambda spec: place.launcher in spec.launchers):
        return of_launcher[0], f"{place.launcher} started this process as rank {place.rank}"
    if place.world_size > 1:
        has_servers = "ps" in place.roles
        name, *_ = names_of(
            lambda spec: "tasks" in spec.launchers and spec.has_servers == has_servers
        )
        where = f"{place.role}, rank {place.rank} of {place.world_size}"
        return name, f"{place.launcher} names this process as {where}"
    import tensorflow as tf

    return choose_for(len(tf.config.list_physical_devices("GPU")))


def choose_for(num_gpus: int) -> tuple[str, str]:
    """Returns the choice for one process that sees ``num_gpus`` GPUs."""
    if num_gpus > 1:
        return "mirrored", f"this process sees {num_gpus} GPUs"
    seen = "one GPU" if num_gpus else "no GPU"
    return "single", f"this process sees {seen} and no launcher started it"
