"""Checkpoints that all processes of a fit write and read, each the parts that it has.

All write into one temporary folder beside the checkpoints; only when all are done does the chief
make one checkpoint of what is there. Until then there is none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.errors import ModelError, TfdistError, WriteError, cannot_write
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.engine.metrics import is_finite
from tfdist.training.memory import part_files

_Told = TypeVar("_Told")

# A disk that is slower than this, for all processes together, is no disk that works.
_SLOW_BYTES_PER_S = 10e6


def tried(
    collective: Collective, act: Callable[[], _Told], target: Path
) -> tuple[_Told | None, TfdistError | None]:
    """Calls ``act``, which writes ``target``; returns what it returned, or the error of writing."""
    try:
        return act(), None
    except TfdistError as error:
        return None, error
    except (OSError, tf.errors.OpError) as error:
        if collective.explain(error) is not None:
            raise  # A rank was lost while all were reading the weights.
        problem = cannot_write(target, error)
        problem.__cause__ = error
        return None, problem


def on_all(
    collective: Collective, act: Callable[[], _Told], target: Path, more_s: float = 0.0
) -> list[tuple[_Told | None, TfdistError | None]]:
    """Calls ``act``, which writes ``target`` or has a part in it, on each process.

    Args:
        more_s: seconds that it may take: see ``Collective.waiting``.

    Returns:
        What ``tried`` returned on each process, on all of them.

    Raises:
        TfdistError: on a process that could not write, its own.
    """
    place = f"the writing of {target.name}"
    with collective.apart(place, more_s):
        told, problem = tried(collective, act, target)
    with collective.waiting(place, more_s):
        of_all = collective.gather((told, problem))
    if problem is not None:
        raise problem  # Told to others, it has lost its cause.
    return of_all


def are_finite(weights: Iterable[Any]) -> bool:
    """Whether all elements of ``weights`` are numbers."""
    return all(is_finite(tf.convert_to_tensor(weight).numpy()) for weight in weights)


class SharedCheckpoints:
    """The processes whose replicas divide weights or slots; all can write in one folder.

    All call each method together.
    """

    def __init__(self, binding: Binding):
        self._model = binding.model
        self._collective = binding.collective
        self._sharded = binding.sharded

    @staticmethod
    def over(binding: Binding, folder: Path, shown: str) -> SharedCheckpoints | None:
        """Returns them; None where nothing is divided, or not all can write in ``folder``.

        The chief alone then writes and reads what all have.

        Args:
            folder: the chief's; those of other processes are not looked at.
            shown: where the checkpoints are, as the user has named it.
        """
        if binding.sharded is None or binding.engine.sharded is not None:
            return None  # An engine that divides slots by itself brings them to the chief.
        blind = _blind(binding.collective, folder)
        if blind is None:
            return SharedCheckpoints(binding)
        if binding.collective.is_chief:
            print(
                f"tfdist: the checkpoints of {shown} are written in a folder that {blind} cannot "
                "write in: rank 0 gathers what all ranks hold, and writes it. In a folder that all "
                "hosts share, each rank writes its own part",
                flush=True,
            )
        return None

    def read(
        self,
        checkpoint: tf.train.Checkpoint,
        path: str,
        read_rest: Callable[[tf.train.Checkpoint, str], None],
    ) -> None:
        """Reads this process's parts, and all that is whole: see ``part_files.read``."""
        with self._sharded.in_parts() as divided:
            part_files.read(checkpoint, path, divided, read_rest)

    def write(
        self, checkpoint: tf.train.Checkpoint, folder: Path, name: str, *, keep: int, is_sound: bool
    ) -> bool:
        """Writes a checkpoint, all of it or nothing.

        Args:
            folder: of the chief; those of other processes are not looked at.
            name: of the checkpoint, as "ckpt-12".
            keep: the last so many are kept.
            is_sound: False where a process knows that the training has diverged.

        Returns:
            False where that, or a weight, is not finite: nothing is written.

        Raises:
            WriteError: a process could not write, as on a full disk.
        """
        collective, target = self._collective, folder / name
        place = _new_place(folder).absolute()

        def begin() -> tuple[bool, str, str]:
            if collective.is_chief:
                place.mkdir(parents=True)
            names = "\n".join(part_files.keys(checkpoint, divided))
            digest = hashlib.sha256(names.encode()).hexdigest()
            trained = self._sharded.trained(self._model.trainable_weights)
            return is_sound and are_finite(trained), digest, str(place)

        def finish() -> None:
            if not collective.is_chief:
                return
            try:
                part_files.merge([prefix for prefix in prefixes if prefix is not None], str(target))
                checkpoint_files.keep_last(folder, name, keep)
            except BaseException:
                checkpoint_files.remove_unfinished(folder, failed=name)
                raise

        with self._sharded.in_parts() as divided:
            try:
                told = self._on_all(begin, target)
                if not all(sound for sound, *_ in told):
                    return False
                _check_alike([digest for _, digest, _ in told])
                there = Path(told[0][2])
                write = functools.partial(self._write_part, checkpoint, there, divided)
                prefixes = self._on_all(write, target, seconds_of(checkpoint))
                self._on_all(finish, target)
            finally:
                if collective.is_chief:
                    shutil.rmtree(place, ignore_errors=True)
            return True

    def _on_all(self, act: Callable[[], _Told], target: Path, more_s: float = 0.0) -> list[_Told]:
        """Calls ``act`` on each process; returns what it returned on each: see ``on_all``.

        Raises:
            WriteError: on all processes, when one could not write.
        """
        of_all = on_all(self._collective, act, target, more_s)
        failed = next((rank for rank, (_, problem) in enumerate(of_all) if problem), None)
        if failed is not None:
            raise WriteError(
                f"{target} must be written by all ranks",
                received=f"rank {failed}: {of_all[failed][1]}",
                mend="Make room, then go on: what was written before is untouched",
            )
        return [told for told, _ in of_all]

    def _write_part(self, checkpoint: tf.train.Checkpoint, place: Path, divided: Any) -> str | None:
        """Returns where this process has written its part; None where it has none."""
        collective = self._collective
        own = str(place / f"rank-{collective.process}")
        try:
            has_any = part_files.write(checkpoint, own, divided, with_rest=collective.is_chief)
        finally:
            if collective.reads_together and not collective.is_chief:  # All must, with the chief.
                with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
                    part_files.write(checkpoint, f"{folder}/checkpoint", divided, with_rest=True)
        return own if has_any else None


def seconds_of(checkpoint: tf.train.Checkpoint) -> float:
    """Returns how long the slowest disk that works may take for a checkpoint."""
    return part_files.num_bytes(checkpoint) / _SLOW_BYTES_PER_S


def _new_place(folder: Path) -> Path:
    """Returns a folder that no other writer has; what is left of it is removed by the next fit."""
    return folder / checkpoint_files.temporary(random.SystemRandom().randrange(10**17, 10**18))


def _blind(collective: Any, folder: Path) -> str | None:
    """Returns the first process that cannot write in the chief's folder, for people."""
    if collective.num_processes == 1:
        return None
    with _probe(folder if collective.is_chief else None) as made:
        place = collective.gather(made)[0]
        # Why there is none, the chief tells later.
        can = place is None or os.access(place, os.W_OK)
        told = collective.gather((can, socket.gethostname()))
    found = (f"rank {rank} on {host}" for rank, (can, host) in enumerate(told) if not can)
    return next(found, None)


@contextlib.contextmanager
def _probe(folder: Path | None) -> Iterator[str | None]:
    if folder is None:
        yield None
        return
    place = _new_place(folder)
    try:
        place.mkdir(parents=True)
    except OSError:
        yield None
        return
    try:
        yield str(place.absolute())
    finally:
        with contextlib.suppress(OSError):  # What is left of it is removed with other leftovers.
            place.rmdir()


def _check_alike(digests: list[str]) -> None:
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise ModelError(
            "all ranks must have one model and one optimizer, whose weights and slots they divide",
            received=f"ones of other names on rank {other} than on rank 0",
            mend="Build them alike on all ranks",
        )
