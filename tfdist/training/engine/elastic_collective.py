"""A ``Collective`` whose processes may change while a fit runs."""

from __future__ import annotations

import abc
from pathlib import Path

import numpy as np

from tfdist.errors import LaunchError
from tfdist.training.engine.collective import Collective


class ProcessLost(LaunchError):
    """Another process of the job was lost within a step."""


class ProcessesChanged(Exception):
    """Processes are about to join or to leave. Raised after a commit, on all processes at once."""


class ElasticCollective(Collective):
    """A ``Collective`` whose processes may change while a fit runs."""

    #: Steps between two commits.
    commit_every_steps: int
    #: Outlives this process, should the engine end it while all meet: a new one goes on from it.
    kept: Path

    @property
    def shares_batches(self) -> bool:
        return True  # Alone, a process may not stay so.

    @abc.abstractmethod
    def will_change(self) -> bool:
        """Whether processes are about to join or to leave; the same on all processes."""

    @abc.abstractmethod
    def meet(self) -> None:
        """Begins anew with the processes that there are now.

        Raises:
            LaunchError: this cannot be done.
        """

    @abc.abstractmethod
    def hand_on(self, arrays: list[np.ndarray], root: int) -> list[np.ndarray]:
        """Returns the arrays of process ``root``; all give arrays of the same shapes and types."""
