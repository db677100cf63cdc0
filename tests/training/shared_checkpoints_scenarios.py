"""Checkpoints that all ranks write and read, each its parts; beside those of divided slots."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near
from scenarios import scenario
from tensorflow import keras

sys.path.append(str(Path(__file__).parent))
from options_scenarios import given, mlp
from shard_scenarios import Break, adam, in_order
from shard_weights_scenarios import stack

import tfdist
from tfdist.errors import CheckpointError, WriteError
from tfdist.strategies.horovod.ring import Ticks
from tfdist.training.checkpoints import shared_checkpoints
from tfdist.training.checkpoints.checkpoint_files import LOCK
from tfdist.training.checkpoints.checkpoint_state import Position
from tfdist.training.engine.binding import binding_of
from tfdist.training.memory import part_files
from tfdist.training.memory.sharded_slots import Parts
from tfdist.training.memory.sharded_weights import ShardedWeights


def kinds(strategy: Any) -> Iterator[tuple[str, Any, Any]]:
    """Gives what is divided, a strategy that divides it, and a model."""
    yield "optimizer", given(strategy, shard="optimizer"), adam
    if strategy.name == "horovod":
        yield "weights", given(strategy, shard="weights"), stack


@contextlib.contextmanager
def nothing_whole() -> Iterator[None]:
    """Fails where parts are brought together."""
    never = mock.Mock(side_effect=AssertionError("parts were brought together"))
    with (
        mock.patch.object(Parts, "gather", never),
        mock.patch.object(ShardedWeights, "_gather", never),
    ):
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


def built(divides: Any, model_fn: Any) -> Any:
    """Returns a model with the same weights each time."""
    keras.utils.set_random_seed(11)
    return divides.build(model_fn)


def broken(divides: Any, model_fn: Any, folder: Path, step: int = 1) -> Any:
    """Keeps a checkpoint of every step of a fit that ends in ``step``, before that is kept."""
    model = built(divides, model_fn)
    keep = tfdist.Checkpoints(folder, every_steps=1)
    with pytest.raises(KeyboardInterrupt):
        model.fit(in_order(divides), epochs=2, callbacks=[keep, Break(step)], verbose=0)
    divides.from_chief(None)
    return model


def unbroken(divides: Any, model_fn: Any) -> list[np.ndarray]:
    model = built(divides, model_fn)
    model.fit(in_order(divides), epochs=2, verbose=0)
    return model.get_weights()


def assert_goes_on(divides: Any, model_fn: Any, folder: Path) -> None:
    expected = unbroken(divides, model_fn)
    model = divides.build(model_fn)
    resume = tfdist.Checkpoints(folder, every_steps=1, resume=True)
    model.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
    assert resume.start.position != Position()
    assert_near(model.get_weights(), expected, 1e-6)


@scenario("mirrored", "horovod", "multi_worker", long=True)
def nobody_brings_them_together(strategy, folder):
    """A file has one data file for each process, and reads as one that one device wrote."""
    for kind, divides, model_fn in kinds(strategy):
        here = folder / kind
        model = built(divides, model_fn)
        keep = tfdist.Checkpoints(here, every_steps=1)
        with nothing_whole():
            model.fit(in_order(divides), callbacks=[keep], verbose=0)
        divides.from_chief(None)
        newest = tfdist.Checkpoints(here).newest
        sizes = [path.stat().st_size for path in sorted(here.glob(f"{newest.name}.data-*"))]
        assert len(sizes) == divides.topology.world_size
        with binding_of(model, needed_by="the test").sharded.whole(everywhere=True):
            own = {v.name: v.numpy() for v in (*model.weights, *model.optimizer.variables)}
        reader = tf.train.load_checkpoint(str(newest))
        shapes = reader.get_variable_to_shape_map()
        kept = [reader.get_tensor(key) for key in shapes if key.startswith(("model/", "optimizer"))]
        for name, value in own.items():
            if value.size > 1:
                assert any(np.array_equal(value, other) for other in kept), name
        resumed = divides.build(model_fn)
        resume = tfdist.Checkpoints(here, every_steps=1, resume=True)
        with nothing_whole():
            resumed.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
        assert_near(resumed.get_weights(), unbroken(divides, model_fn), 1e-6)


def on_a_full_disk(write: Any) -> Any:
    """Returns ``write`` for a process that can write no byte of it."""

    def limited(*args: Any, **options: Any) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        try:
            return write(*args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@scenario("horovod", "multi_worker", long=True)
def a_rank_that_cannot_write_leaves_all_as_it_was(strategy, folder):
    for number, (kind, divides, model_fn) in enumerate(kinds(strategy)):
        here, full = folder / kind, number % 2  # One rank, then the other.
        broken(divides, model_fn, here)
        before = files(here)
        divides.from_chief(None)
        model = divides.build(model_fn)
        resume = tfdist.Checkpoints(here, every_steps=1, resume=True)
        is_full = divides.topology.rank == 1 - full
        found = r"found File too large" if is_full else rf"found rank {1 - full}: .*File too large"
        write = part_files.write
        with (
            mock.patch.object(part_files, "write", on_a_full_disk(write) if is_full else write),
            pytest.raises(WriteError, match=rf"ckpt-.* must be written .*{found}"),
        ):
            model.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
        divides.from_chief(None)
        assert files(here) == before
        assert_goes_on(divides, model_fn, here)


def slow(write: Any, waits: list[float]) -> Any:
    """Returns ``write`` for a process whose disk keeps it waiting so often."""

    def waiting(*args: Any, **options: Any) -> Any:
        time.sleep(waits.pop() if waits else 0.0)
        return write(*args, **options)

    return waiting


@scenario("horovod", "multi_worker", long=True)
def a_disk_that_is_slower_than_a_step_may_be(strategy, folder):
    """Nobody is missing while a rank writes its part, or the chief all."""
    writers = [(1, part_files, "write"), (0, tf.train.CheckpointManager, "save")]
    for options, (writer, owner, name) in zip([{"shard": "optimizer"}, {}], writers, strict=True):
        divides = given(strategy, stall_timeout_s=2, **options)
        model = divides.build(adam)
        keep = tfdist.Checkpoints(folder / name, every_steps=1)
        waits = [3.5] if divides.topology.rank == writer else []
        with (
            mock.patch.object(owner, name, slow(getattr(owner, name), waits)),
            mock.patch.object(Ticks, "_sum", autospec=True, side_effect=Ticks._sum) as tick,
        ):
            model.fit(in_order(divides), callbacks=[keep], verbose=0)
        divides.from_chief(None)
        newest = tfdist.Checkpoints(folder / name).newest
        assert newest.name == f"ckpt-{in_order(divides).steps_per_epoch}"
        assert not waits
        if divides.name == "horovod" and divides.topology.rank == writer:
            # Horovod's own deadline, which a process has once, does not see one wait that long.
            assert sum(busy for (_, busy), _ in tick.call_args_list) > 1


@scenario("horovod")
def a_part_that_is_damaged(strategy, folder):
    """The rank that needs it finds out; all take the checkpoint before."""
    for kind, divides, model_fn in kinds(strategy):
        here = folder / kind
        broken(divides, model_fn, here, step=2)
        newest = tfdist.Checkpoints(here).newest
        divides.from_chief(None)
        if divides.topology.is_chief:
            part = here / f"{newest.name}.data-00001-of-00002"
            part.write_bytes(part.read_bytes()[:-20])
        divides.from_chief(None)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert_goes_on(divides, model_fn, here)
        said = printed.getvalue()
        if divides.topology.is_chief:
            assert f"{newest.name} is damaged" in said, said
            assert "says rank 1); trying the one before it" in said, said
        else:
            assert not said


@scenario("horovod", "multi_worker", long=True)
def a_folder_that_one_rank_cannot_write_in(strategy, folder):
    """Hosts without a disk that they share: the chief gathers, writes, and reads."""
    for kind, divides, model_fn in kinds(strategy):
        here = folder / kind
        blind = mock.Mock(return_value=divides.topology.is_chief)
        with mock.patch.object(shared_checkpoints.os, "access", blind):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                broken(divides, model_fn, here)
            says = f"tfdist: the checkpoints of {here} are written in a folder that rank 1 on "
            assert (says in printed.getvalue()) == divides.topology.is_chief
            newest = tfdist.Checkpoints(here).newest
            assert len(list(here.glob(f"{newest.name}.data-*"))) == 1
            assert_goes_on(divides, model_fn, here)
        # What was written whole is read in parts.
        again = folder / f"{kind}-again"
        broken(divides, model_fn, again)
        assert_goes_on(divides, model_fn, again)


class Spoil(keras.callbacks.Callback):
    """Makes an element of this rank's parts infinite after a step."""

    def __init__(self, batch: int):
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch:
            sharded = binding_of(self.model, needed_by="the test").sharded
            part = sharded.trained(self.model.get_layer("block1").trainable_weights)[0]
            part.assign(tf.fill(part.shape, np.inf))


@scenario("horovod")
def what_one_rank_alone_sees_diverge(strategy, folder):
    divides = given(strategy, shard="weights")
    model = divides.build(stack)
    keep = tfdist.Checkpoints(folder / "kept", every_steps=1)
    own = [Spoil(1)] if divides.topology.rank == 1 else []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(in_order(divides), epochs=1, callbacks=[*own, keep], verbose=0)
    divides.from_chief(None)
    names = sorted(path.name for path in (folder / "kept").glob("*.index"))
    assert names == ["ckpt-1.index"]
    if divides.topology.is_chief:
        assert "no checkpoint is kept" in printed.getvalue()
    assert not [path for path in (folder / "kept").iterdir() if path.name.endswith("_temp")]


@scenario("mirrored", "horovod", long=True)
def another_model_is_refused(strategy, folder):
    divides = given(strategy, shard="optimizer")
    broken(divides, adam, folder)
    model = divides.build(lambda: mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)))
    resume = tfdist.Checkpoints(folder, resume=True)
    with pytest.raises(CheckpointError, match="must be resumed by the model that wrote it"):
        model.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)


@scenario("horovod", long=True)
def the_last_ones_are_kept(strategy, folder):
    divides = given(strategy, shard="optimizer")
    model = divides.build(adam)
    keep = tfdist.Checkpoints(folder / "kept", every_steps=1, keep=2)
    model.fit(in_order(divides), epochs=2, callbacks=[keep], verbose=0)
    divides.from_chief(None)
    here = {path.name for path in (folder / "kept").iterdir()} - {LOCK}
    last = in_order(divides).steps_per_epoch * 2
    parts = {
        f"ckpt-{number}.{end}"
        for number in (last - 1, last)
        for end in ("index", "data-00000-of-00002", "data-00001-of-00002")
    }
    assert here == {*parts, "checkpoint"}
    assert os.path.basename(tf.train.latest_checkpoint(str(folder / "kept"))) == f"ckpt-{last}"
