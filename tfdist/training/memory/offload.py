"""Activations that lie elsewhere until the way back: ``offload="activations"``.

What the way back reads of the way forward is moved to the host's memory, or written to a folder, as
soon as it is computed, and comes back when the gradient that meets it is there. Rajbhandari et al.
2021, arXiv:2104.07857.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import InUseError, ModelError, WriteError, cannot_write, in_one_line
from tfdist.training.engine.folder_lock import FolderLock
from tfdist.training.memory.sharded_slots import host_of

_PREFIX = "tfdist-activations-"
_HERE = re.sub(r"\W", "_", socket.gethostname())
_LOCK = "tfdist.lock"
# They are there at once, hold nothing, and are read before any gradient is known.
_OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# Tensors on their way out: the way forward would be far ahead of a disk, and hold them all.
_IN_FLIGHT = 1


class Activations:
    """Moves what the steps of one model keep for the way back.

    Args:
        folder: where it is written; None: the host's memory.

    Raises:
        WriteError: nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike | None):
        self._folder = None if folder is None else _OwnFolder(Path(folder), self)
        self._numbers = itertools.count()

    def move(self, begun: int, turned: int, loss: tf.Tensor, gradients: Sequence[Any]) -> None:
        """Has what the gradients read lie elsewhere until they do.

        Args:
            begun: operations of the graph when the way forward began; see ``count``.
            turned: when it had ended.
            loss: the end of the way forward.
            gradients: tensors, tf.IndexedSlices or None.

        Raises:
            ModelError: the step runs eagerly.
        """
        if tf.executing_eagerly():
            raise ModelError(
                "a model whose activations are offloaded must take its steps as graphs",
                received="run_eagerly=True",
                mend="Compile it without run_eagerly, or leave offload out",
            )
        operations = tf.compat.v1.get_default_graph().get_operations()
        numbers = {operation: number for number, operation in enumerate(operations)}
        of_data = _of_data(operations[begun:turned], numbers, begun)
        uses: dict[Any, list[tuple[tf.Operation, int]]] = {}
        for operation in _reached(gradients, numbers, turned):
            if operation.type in _OF_SHAPES:
                continue
            for index, tensor in enumerate(operation.inputs):
                if tensor.op in of_data and _is_worth_it(tensor):
                    uses.setdefault(tensor.ref(), []).append((operation, index))
        tensors = [reference.deref() for reference in uses]
        tensors.sort(key=lambda tensor: numbers[tensor.op])
        # Of the first one: those that were made later cannot come before it.
        firsts = [uses[tensor.ref()][0][0] for tensor in tensors]
        signs: dict[Any, tf.Tensor] = {}
        whens = [
            [_sign_of(source, signs) for source in _waited_for(first, numbers, turned) or [loss]]
            for first in firsts
        ]
        gone: list[tuple[tf.Operation, tf.Operation]] = []  # What made a tensor, what takes it.
        for tensor, first, when in zip(tensors, firsts, whens, strict=True):
            made, taken = gone[-1 - _IN_FLIGHT] if len(gone) > _IN_FLIGHT else (None, None)
            # There is no public way to change a graph.
            if taken is not None and made is not tensor.op:
                tensor.op._add_control_input(taken)  # noqa: SLF001
            away, fetched = self._fetched(tensor, first.device, when)
            gone.append((tensor.op, away))
            for operation, index in uses[tensor.ref()]:
                operation._update_input(index, fetched)  # noqa: SLF001

    def _fetched(
        self, tensor: tf.Tensor, device: str, when: list[Any]
    ) -> tuple[tf.Operation, tf.Tensor]:
        """Returns what takes ``tensor`` away, and what brings it to ``device`` after ``when``."""
        host = host_of(tensor.device)
        if self._folder is None:
            with tf.device(host):
                kept = tf.identity(tensor, name="offloaded")
                # It waits there: what copies to a device begins when its source is known.
                with tf.control_dependencies(when):
                    back = tf.identity(kept, name="awaited")
            with tf.device(device):
                return kept.op, tf.identity(back, name="fetched")
        with tf.device(host):
            values = tf.io.serialize_tensor(tensor)
            # Of a path that is a constant TensorFlow would read what is there when it optimizes.
            path = str(self._folder.path / f"{next(self._numbers)}")
            path = tf.strings.join([path, tf.strings.substr(values, 0, 0)])
            written = tf.io.write_file(path, values)
            with tf.control_dependencies([*when, written]):
                kept = tf.io.parse_tensor(tf.io.read_file(path), tensor.dtype)
        kept.set_shape(tensor.shape)
        with tf.device(device):
            return written, tf.identity(kept, name="fetched")


def count() -> int:
    """Returns how many operations the graph that is traced has."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def _waited_for(
    operation: tf.Operation, numbers: dict[tf.Operation, int], turned: int
) -> list[Any]:
    """Returns what an operation of the way back waits for, beside what is fetched for it."""
    inputs = [tensor for tensor in operation.inputs if numbers[tensor.op] >= turned]
    return inputs + [other for other in operation.control_inputs if numbers[other] >= turned]


def _sign_of(source: tf.Tensor | tf.Operation, signs: dict[Any, tf.Tensor]) -> Any:
    """Returns what is there as soon as ``source`` is, whatever TensorFlow optimizes.

    Constants are pushed through products, which then change places: who had only waited for one
    waited for another, or for the constant. One whose numbers are read stays what it is.
    """
    tensor = source.outputs[0] if isinstance(source, tf.Operation) and source.outputs else source
    if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
        return source
    if tensor.ref() not in signs:
        with tf.device(tensor.device):
            signs[tensor.ref()] = tf.reshape(tensor, [-1])[:1]
    return signs[tensor.ref()]


def _of_data(
    operations: Sequence[tf.Operation], numbers: dict[tf.Operation, int], begun: int
) -> set[tf.Operation]:
    """Returns the operations that compute of what was there before; weights are read, not made."""
    found: set[tf.Operation] = set()
    for operation in operations:
        for tensor in operation.inputs:
            is_given = numbers[tensor.op] < begun and tensor.dtype != tf.resource
            if is_given or tensor.op in found:
                found.add(operation)
                break
    return found


def _is_worth_it(tensor: tf.Tensor) -> bool:
    """Whether a tensor can lie elsewhere, and is no mere number a row."""
    has_values = tensor.dtype.is_floating or tensor.dtype == tf.bool
    return has_values and (tensor.shape.rank is None or tensor.shape.rank > 1)


def _reached(
    gradients: Sequence[Any], numbers: dict[tf.Operation, int], turned: int
) -> list[tf.Operation]:
    """Returns the operations of the way back, in the order in which they were made."""
    flat = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
    waiting = [tensor.op for tensor in flat]
    found: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation in found or numbers[operation] < turned:
            continue
        found.add(operation)
        waiting += [tensor.op for tensor in operation.inputs]
    return sorted(found, key=numbers.__getitem__)


def explain_folder_error(error: Exception, folder: str | os.PathLike | None) -> WriteError | None:
    """Returns what an error of a step means that names the folder; None where it names none."""
    if folder is None or f"{Path(folder).resolve()}{os.sep}{_PREFIX}" not in str(error):
        return None
    return WriteError(
        "activations must be written to offload_dir, and read again, while the fit runs",
        received=f"an error: {in_one_line(error)}",
        mend="Give a folder on a disk with more room, and leave what is in it alone",
    )


class _OwnFolder:
    """A folder of this process's within one that a user gave; it goes with its owner.

    Args:
        within: the user's folder.
        owner: an object; the folder is removed when it is collected, or when the process ends.
    """

    def __init__(self, within: Path, owner: Any):
        within = within.resolve()  # The program may change its working folder.
        for left in within.glob(f"{_PREFIX}*"):
            _remove_what_is_left(left)
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{_HERE}-", dir=within))
            lock = FolderLock(made / _LOCK)
            # Nobody looks at it before it is locked.
            self.path = made.rename(within / made.name.removeprefix("."))
        except OSError as error:
            raise cannot_write(within, error) from error
        weakref.finalize(owner, _remove, self.path, lock, os.getpid())


def _remove_what_is_left(path: Path) -> None:
    """Removes the folder of a process of this host that has ended, as one that was killed.

    Its lock tells: in several containers of one name processes have the same numbers. The name of
    the host is asked for as well, since some network file systems lock within a host alone.
    """
    is_of_this_host = path.name.startswith(f"{_PREFIX}{_HERE}-")
    if not is_of_this_host or path.is_symlink() or not (path / _LOCK).is_file():
        return
    with contextlib.suppress(InUseError, WriteError):
        lock = FolderLock(path / _LOCK)
        if lock.excludes:
            _remove_files(path, lock)


def _remove(path: Path, lock: FolderLock, process: int) -> None:
    if os.getpid() == process:  # Not in one that it forked.
        _remove_files(path, lock)


def _remove_files(path: Path, lock: FolderLock) -> None:
    """Removes the numbered files in a folder, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        files = list(path.iterdir())
        for file in files:
            if file.name.isdecimal():
                file.unlink()
        if all(file.name.isdecimal() or file.name == _LOCK for file in files):
            (path / _LOCK).unlink()
            path.rmdir()
    lock.release()
