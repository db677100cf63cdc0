"""Files that several processes write together; here one process plays all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import CheckpointError
from tfdist.training.memory import part_files
from tfdist.training.memory.flat_parts import Division
from tfdist.training.memory.part_files import Divided, rectangles

SHAPES = [(7,), (1,), (3, 5), (5, 1), (1, 6), (2, 3, 4), (3, 1, 2, 2), (), (0, 4)]
RNG = np.random.default_rng(0)
VALUES = [RNG.normal(size=shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and 0 not in shape])
def test_rectangles_follow_the_elements(shape):
    whole = np.arange(math.prod(shape)).reshape(shape)
    for begin, end in itertools.combinations_with_replacement(range(whole.size + 1), 2):
        found = rectangles(shape, begin, end)
        cut = [
            whole[tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))].ravel()
            for starts, lengths in found
        ]
        np.testing.assert_array_equal(np.concatenate([[], *cut]), np.arange(begin, end))
        assert len(found) <= 2 * len(shape) - 1


def variables(values=VALUES):
    made = {f"v{number}": tf.Variable(value) for number, value in enumerate(values)}
    return made, tf.train.Checkpoint(inner=tf.train.Checkpoint(**made), whole=tf.Variable(3.0))


def divided(wholes, processes, process, local=1):
    """Of a process with ``local`` replicas; its parts have the values of the wholes."""
    found = []
    for whole in wholes.values():
        division = Division(tuple(whole.shape), processes * local, whole.dtype)
        numbers = range(process * local, (process + 1) * local)
        parts = {number: tf.Variable(division.part(whole, number)) for number in numbers}
        found.append(Divided(whole, division, parts))
    return found


def written(folder, processes, local=1):
    prefixes = []
    for process in range(processes):
        made, checkpoint = variables()
        own = divided(made, processes, process, local)
        for whole in made.values():  # What is written comes from the parts.
            whole.assign(tf.fill(whole.shape, np.nan))
        prefix = str(folder / "ckpt-1_temp" / f"rank-{process}")
        (folder / "ckpt-1_temp").mkdir(exist_ok=True)
        if part_files.write(checkpoint, prefix, own, with_rest=process == 0):
            prefixes.append(prefix)
    part_files.merge(prefixes, str(folder / "ckpt-1"))
    return str(folder / "ckpt-1")


def read_rest(checkpoint, path):
    checkpoint.read(path).assert_existing_objects_matched().expect_partial()


@pytest.mark.parametrize(("processes", "local"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (9, 1)])
def test_others_read_them_whole_and_in_other_parts(tmp_path, processes, local):
    path = written(tmp_path, processes, local)
    made, checkpoint = variables([np.zeros_like(value) for value in VALUES])
    read_rest(checkpoint, path)
    for value, whole in zip(VALUES, made.values(), strict=True):
        np.testing.assert_array_equal(whole, value)
    for others in (1, 2, 5):
        for process in range(others):
            made, checkpoint = variables([np.zeros_like(value) for value in VALUES])
            checkpoint.whole.assign(0.0)
            own = divided(made, others, process)
            part_files.read(checkpoint, path, own, read_rest)
            assert checkpoint.whole.numpy() == 3.0
            for value, each in zip(VALUES, own, strict=True):
                np.testing.assert_array_equal(
                    each.parts[process], each.division.part(value, process)
                )
                assert not np.any(each.whole)  # The whole was never made.


def test_what_another_strategy_wrote_whole_is_read_in_parts(tmp_path):
    _, checkpoint = variables()
    path = checkpoint.write(str(tmp_path / "ckpt-1"))
    for process in range(2):
        other, checkpoint = variables([np.zeros_like(value) for value in VALUES])
        own = divided(other, 2, process)
        part_files.read(checkpoint, path, own, read_rest)
        for value, each in zip(VALUES, own, strict=True):
            np.testing.assert_array_equal(each.parts[process], each.division.part(value, process))


@pytest.mark.parametrize("end", [".index", ".data-00000-of-00002", ".data-00001-of-00002"])
@pytest.mark.parametrize("harm", ["cut", "gone", "a byte"])
def test_damage_is_found_by_a_process_that_needs_what_is_damaged(tmp_path, end, harm):
    path = written(tmp_path, 2)
    file = tmp_path / f"ckpt-1{end}"
    sound = file.read_bytes()
    for place in range(0, len(sound), 23 if harm == "a byte" else len(sound)):
        if harm == "gone":
            file.unlink()
        else:
            changed = bytearray(sound)
            changed[place] ^= 0xFF
            file.write_bytes(changed if harm == "a byte" else sound[: len(sound) // 2])
        found = []
        for process in range(2):
            made, checkpoint = variables([np.zeros_like(value) for value in VALUES])
            own = divided(made, 2, process)
            try:
                part_files.read(checkpoint, path, own, read_rest)
            except Exception as error:
                found.append(error)
                continue
            for value, each in zip(VALUES, own, strict=True):
                part = each.division.part(value, process)
                np.testing.assert_array_equal(each.parts[process], part)
        assert found or harm == "a byte", "nobody noticed"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([*VALUES[:-1], np.zeros((4, 4), np.float32)], r"shape \[0, 4\] for .*is \[4, 4\]"),
        ([*VALUES, np.zeros(3, np.float32)], r"no values for .* shape is \[3\]"),
    ],
)
def test_another_model_is_refused(tmp_path, values, says):
    path = written(tmp_path, 2)
    made, checkpoint = variables(values)
    with pytest.raises(CheckpointError, match=rf"by the model that wrote it, but found .*{says}"):
        part_files.read(checkpoint, path, divided(made, 2, 1), read_rest)
