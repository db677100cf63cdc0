"""Strategies by name. Each is imported, and its engine with it, when it is first asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from tfdist import topology
from tfdist.compat import check_versions, follow_program
from tfdist.errors import OptionError, unknown_choice
from tfdist.strategies.registry import (
    REGISTRY,
    check_takes_keras,
    known_options,
    names_of,
    register,
    spec_of,
    strategy_class,
)
from tfdist.strategies.spec import REPLICAS, Spec

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy
    from tfdist.strategies.federated.strategy import Federated
    from tfdist.strategies.mesh.strategy import Mesh
    from tfdist.strategies.pipeline.strategy import Pipeline

__all__ = [
    "REGISTRY",
    "REPLICAS",
    "Spec",
    "check_options",
    "check_takes_keras",
    "known_options",
    "names_of",
    "register",
    "spec_of",
    "strategy",
    "strategy_class",
]


# These have methods or arguments of their own, which a type checker then knows.
@overload
def strategy(name: Literal["mesh"], **options: Any) -> Mesh: ...
@overload
def strategy(name: Literal["pipeline"], **options: Any) -> Pipeline: ...
@overload
def strategy(name: Literal["federated"], **options: Any) -> Federated: ...
@overload
def strategy(name: str, **options: Any) -> Strategy: ...
def strategy(name: str, **options: Any) -> Strategy:
    """Returns the strategy called ``name``.

    Args:
        name: one of the registered names, or "auto": Horovod under mpirun or horovodrun,
            multi_worker under srun, on several SageMaker hosts or with TF_CONFIG (there with
            parameter servers: parameter_server), mirrored with several GPUs, else single; it prints
            what it chose and why.
        options: those of the strategy; ``known_options(name)`` lists them.

    Raises:
        OptionError: the name or an option is unknown; the message lists the known ones.
        EngineMissingError: the TensorFlow or the Keras here is not one that tfdist, or this
            strategy, runs on.
    """
    if name == "auto":
        name, reason = choose()
        if topology.current().is_chief:
            print(f"tfdist: strategy '{name}', because {reason}", flush=True)
    cls = strategy_class(name)
    check_options(name, options)
    follow_program(os.environ)
    check_versions()
    check_takes_keras(name)
    return cls(**options)


def check_options(name: str, options: Iterable[str]) -> None:
    """Checks names of options. Raises OptionError: ``name`` has no such; "auto" chooses later."""
    if name == "auto":
        return
    known = known_options(name)
    for option in options:
        if option == "replicas" and spec_of(name).launchers:
            dividing = " or ".join(names_of(lambda spec: spec.divides_model))
            raise OptionError(
                f"replicas must be given to a strategy that divides one model, {dividing}",
                received=f"strategy '{name}', whose processes are replicas already",
                mend=f"Leave it out, or choose {dividing}",
            )
        if option not in known:
            raise unknown_choice(f"option of strategy '{name}'", option, sorted(known))


def parse_options(name: str, pairs: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Reads ``key=value`` texts as options of a strategy; values are Python literals or words.

    Raises:
        OptionError: a text without "=", or an unknown option.
    """
    import ast

    options = {}
    # What "auto" will choose is not known here: "single" has the options that most have.
    known = known_options("single" if name == "auto" else name)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(
                "an option must be written as key=value",
                received=repr(pair),
                mend=f"Write {pair}=VALUE",
            )
        if text.lower() == "none":  # The word, where it is what others are of: shard, offload.
            takes_words = key in known and isinstance(known[key].default, str)
            options[key] = "none" if takes_words else None
            continue
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = {"true": True, "false": False}.get(text.lower(), text)
    check_options(name, options)
    return options


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
