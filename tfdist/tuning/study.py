"""What is known of a search: Optuna's study, in a file that a kill at any moment leaves whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError, extra_module

if TYPE_CHECKING:
    import optuna

_NAME = "tfdist"
#: Attributes of trials: that all has been chosen, and why one has failed.
DEFINED, REASON = "defined", "reason"
PRUNERS = ("halving", "median", "none")


class _Lock:
    """Held by the kernel for a process, and so by none that was killed: Optuna's own would stay."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # A file system without locks: a line is one write.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # For the time that one line takes.
        return True

    def release(self) -> None:
        os.close(self._descriptor)


class Study:
    """A study of Optuna's on a file.

    Args:
        journal: the file.
        mode: "min" or "max": what is better.
        seed: of what is suggested: the same history leads to the same next trial.
        pruner: one of PRUNERS: which trials go on.
        grace: epochs before a trial may end early.
        reduction: of halving: one trial in so many goes on.

    Attributes:
        optuna: Optuna's own.
        settings: what another process makes the same study with.

    Raises:
        EngineMissingError: Optuna is not installed. DataError: the file is damaged.
    """

    def __init__(
        self, journal: Path, *, mode: str, seed: int, pruner: str, grace: int, reduction: int
    ):
        optuna = imported()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        backend = JournalFileBackend(str(journal), _Lock(journal.with_suffix(".lock")))
        self._seed = seed
        self.settings = {"mode": mode, "seed": seed, "pruner": pruner}
        self.settings |= {"grace": grace, "reduction": reduction}
        try:
            self._storage = JournalStorage(backend)
            with _quiet(optuna):
                self.optuna = optuna.create_study(
                    storage=self._storage,
                    study_name=_NAME,
                    direction=f"{mode}imize",
                    load_if_exists=True,
                    pruner=_pruner(optuna, pruner, grace, reduction),
                )
        except (ValueError, TypeError, LookupError) as error:
            raise damaged(journal, error) from None

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All of them, in their order."""
        return self.optuna.get_trials(deepcopy=False)

    def ask(self) -> int:
        """Returns the number of a new trial."""
        number = len(self.trials)
        self._seeded(number)
        return self.optuna.ask().number

    def trial(self, number: int) -> optuna.trial.Trial:
        """Returns a running trial, which suggests again what it has suggested before."""
        from optuna.trial import Trial

        self._seeded(number)
        study = self._storage.get_study_id_from_name(_NAME)
        return Trial(
            self.optuna, self._storage.get_trial_id_from_study_id_trial_number(study, number)
        )

    def note(self, number: int, values: dict[int, float]) -> bool:
        """Keeps values by epoch; whether the trial may go on after the last of them."""
        trial = self.trial(number)
        known = self.trials[number].intermediate_values
        for epoch, value in values.items():
            if epoch not in known:
                trial.report(value, epoch)
        return not trial.should_prune()

    def end(self, number: int, state: str, value: float | None = None) -> None:
        """Ends a trial: as "COMPLETE" with its value, as "PRUNED", or as "FAIL"."""
        from optuna.trial import TrialState

        with _quiet(imported()):
            self.optuna.tell(number, value, TrialState[state])

    def _seeded(self, number: int) -> None:
        """Has what a trial is given depend on those before it alone, and not on who asks when."""
        import numpy as np
        from optuna.samplers import TPESampler

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        # Those that run count as bad ones, so that none beside them is tried again.
        self.optuna.sampler = TPESampler(seed=seed, constant_liar=True)


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a file of a search."""
    return DataError(
        f"{path} must be as tfdist tune wrote it",
        received=f"an error: {error}",
        mend="Search anew in another folder",
    )


def mend(journal: Path) -> None:
    """Removes a last line that was written in part, as by a process that was killed."""
    if journal.exists():
        whole = journal.read_bytes().rpartition(b"\n")
        if whole[2]:
            os.truncate(journal, len(whole[0]) + len(whole[1]))


def imported() -> Any:
    """Returns Optuna. Raises EngineMissingError: it is not installed."""
    return extra_module("optuna", "optuna", "a search for hyperparameters", "tune")


def _pruner(optuna: Any, name: str, grace: int, reduction: int) -> optuna.pruners.BasePruner:
    """Returns what decides at the epochs of ``Request.rungs``."""
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=grace, reduction_factor=reduction
        )
    if name == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=grace, interval_steps=grace)
    return optuna.pruners.NopPruner()


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Encloses what Optuna would tell lines about."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
