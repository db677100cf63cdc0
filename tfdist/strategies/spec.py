"""What a strategy is, told once, for all that choose, start, show or try one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError, unknown_choice

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy


LAUNCHERS = ("mpi", "gloo", "tasks")

#: Strategies of which each rank can hold a model that another strategy divides.
REPLICAS = ("horovod", "multi_worker")
_SHARDS = ("none", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A strategy, before its engine is imported.

    Attributes:
        name: what users write.
        path: "module:Class", imported when the strategy is first asked for.
        summary: one line for people.
        launchers: how its processes are started, the default first: "mpi", "gloo", or "tasks",
            which tfdist starts itself. Empty where one process is all.
        is_elastic: whether its job can go on when processes are lost; "gloo" starts it then.
        has_servers: whether there are parameter servers beside the workers.
        is_asynchronous: whether workers take steps of their own, so that two trainings are never
            quite the same.
        takes_keras_3: whether it trains models of Keras 3, too.
        divides_model: whether it divides a model among devices of one process, so that each rank of
            ``REPLICAS`` can hold one: its option ``replicas``.
        engine: what ``tfdist doctor`` tries for it; None for one step of the strategy itself.
        example: options with which one process divides the work of a small machine, for those that
            try every strategy: examples, benchmarks, tests.
        sagemaker: how the toolkit of SageMaker's containers starts it; None for one process.

    Raises:
        OptionError: there is no such launcher.
    """

    name: str
    path: str
    summary: str
    launchers: tuple[str, ...] = ()
    is_elastic: bool = False
    has_servers: bool = False
    is_asynchronous: bool = False
    takes_keras_3: bool = False
    divides_model: bool = False
    engine: str | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    sagemaker: str | None = None

    def __post_init__(self) -> None:
        for launcher in self.launchers:
            if launcher not in LAUNCHERS:
                raise unknown_choice(f"launcher of strategy '{self.name}'", launcher, LAUNCHERS)

    @property
    def has_controllers(self) -> bool:
        """Whether users may choose what starts its processes."""
        return bool(self.launchers) and "tasks" not in self.launchers

    def load(self) -> type[Strategy]:
        """Imports and returns the class."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


def check_replicas(replicas: object) -> None:
    """Raises:
    OptionError: no strategy whose ranks can each hold a model that is divided.
    """
    if replicas is not None and replicas not in REPLICAS:
        raise unknown_choice("strategy of replicas", replicas, REPLICAS)


def check_shard(shard: object, replicas: object, strategy: str, *, or_else: str = "") -> None:
    """Checks what the ranks of a strategy that divides one model are to divide among them.

    Args:
        or_else: what there is beside it.

    Raises:
        OptionError: they cannot.
    """
    if shard == "weights":
        raise OptionError(
            "shard='weights' must be on strategy 'horovod' or 'multi_worker'",
            received=f"strategy '{strategy}', which divides the weights of each rank by itself",
            mend="Give replicas and shard='optimizer', which divides slots among the ranks",
        )
    if shard not in _SHARDS:
        raise unknown_choice("shard", shard, _SHARDS)
    if shard != "none" and replicas is None:
        raise OptionError(
            "shard must go with replicas, among which slots are divided",
            received=f"shard={shard!r} without replicas",
            mend=f"Give replicas='horovod' or 'multi_worker' too, or leave shard out{or_else}",
        )
