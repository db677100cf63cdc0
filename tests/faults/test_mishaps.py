"""One training, one mishap after the other, each resumed: at its end nothing was lost."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

# Of the 30 steps, ten an epoch; a checkpoint is written every three, and at each epoch's end.
FULL = "File too large"


def a_shard_is_damaged(training, shards: Path, rank: int = 0) -> None:
    """In the middle of the training; the shard is as before when this returns."""
    shard = sorted(shards.glob("train-*"))[rank]
    sound = shard.read_bytes()
    training.run(2, [shard.name, "record 50"], place="epoch", after=1, damage=str(shard), rank=rank)
    assert shard.read_bytes() != sound
    shard.write_bytes(sound)


def a_shard_is_cut(training, shards: Path, rank: int) -> None:
    """Between two records, while it is read: TensorFlow takes it for the end of the file."""
    shard = sorted(shards.glob("train-*"))[rank]
    sound = shard.read_bytes()
    words = [f"{shard.name}: has 50 records, the manifest says 100"]
    training.run(2, words, place="epoch", after=1, cut=str(shard), rank=rank)
    assert shard.stat().st_size * 2 == len(sound)
    shard.write_bytes(sound)


def assert_nothing_lost(training, unbroken: dict[str, np.ndarray]) -> None:
    found = training.weights()
    assert found.keys() == unbroken.keys()
    for name, expected in unbroken.items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_one_process(training, shards, unbroken, rng, tmp_path):
    run = training("--strategy", "single")

    for place, number in (("import", SIGINT), ("build", SIGTERM), ("trace", SIGINT)):
        run.interrupted(place, number)
        assert not run.folder.exists()
    run.interrupted("checkpoint", SIGTERM)
    assert not run.folder.exists()

    run.lost(0, after=rng.randrange(4, 8))
    assert run.checkpoints() in ([3], [3, 6])
    run.interrupted("epoch", SIGINT)
    run.interrupted("evaluation", SIGTERM)
    assert run.checkpoints() == [3, 6, 9]

    run.run(2, [FULL, "history.csv"], place="evaluation", limit=10)
    run.run(2, [FULL, "ckpt-10"], place="epoch", limit=1500)
    assert run.checkpoints() == [3, 6, 9]

    stuck = ["silence, first of rank 0, ", f"rank 0 on {socket.gethostname()} was last heard of in"]
    run.run(2, stuck, ("--stall-timeout", "5"), place="data", after=15)

    a_shard_is_damaged(run, shards)
    newest = run.folder / "checkpoints" / f"ckpt-{run.checkpoints()[-1]}.data-00000-of-00001"
    newest.write_bytes(newest.read_bytes()[:-300])
    run.interrupted("save", SIGINT)
    assert run.checkpoints()[-1] == 30

    sound = run.folder.with_name("sound")
    shutil.copytree(run.folder / "checkpoints", sound)
    for index in (run.folder / "checkpoints").glob("*.index"):
        index.write_bytes(index.read_bytes()[:40])

    def files() -> dict[Path, bytes]:  # But those that tell who is at work.
        found = (p for p in run.folder.rglob("*") if p.is_file() and p.name[:7] != ".tfdist")
        return {path: path.read_bytes() for path in found}

    before = files()
    run.run(2, ["must have a checkpoint that can be read", "ckpt-30, ckpt-29, ckpt-26"])
    assert files() == before
    shutil.copytree(sound, run.folder / "checkpoints", dirs_exist_ok=True)

    run.run(2, [FULL, "model.keras"], place="save", limit=2000)
    run.run(2, ["No space left", "standard output"], stdout="/dev/full")
    run.run(0)
    assert_nothing_lost(run, unbroken(1))
    assert run.open_to_all == set()


def test_several_devices(training, shards, unbroken, rng):
    run = training("--strategy", "mirrored")
    run.interrupted("epoch", SIGKILL, after=rng.randrange(4, 18))
    a_shard_is_damaged(run, shards)
    run.run(0)
    assert_nothing_lost(run, unbroken(1))
    assert run.open_to_all == set()


@pytest.mark.parametrize("options", ["horovod", "multi_worker -o shard=optimizer"])
def test_several_processes(training, shards, unbroken, rng, options):
    run = training("--strategy", *options.split(), "--workers", "2")
    run.interrupted("epoch", SIGINT, after=rng.randrange(3, 9))
    if "shard" in options:
        run.lost(1, place="part", rank=1, after=1)
        run.run(2, [FULL, "ckpt-"], place="epoch", limit=300)
    else:
        run.interrupted("checkpoint", SIGTERM, after=1)
        run.run(2, [FULL, "ckpt-"], place="epoch", limit=1500)
    a_shard_is_damaged(run, shards, rank=1)
    a_shard_is_cut(run, shards, rank=1)
    run.run(0)
    assert_nothing_lost(run, unbroken(2))
    assert run.open_to_all == set()


def test_parts_that_all_processes_write(training, shards, unbroken, rng):
    run = training("--strategy", "horovod", "-o", "shard=weights", "--workers", "2")
    run.interrupted("checkpoint", SIGKILL, after=1)  # All parts are there, under other names.
    run.lost(1, place="part", rank=1, after=1)
    run.lost(0, place="checkpoint", after=1)
    run.interrupted("part", SIGTERM, rank=1, after=1)
    run.run(2, [FULL, "ckpt-"], place="epoch", limit=300, rank=1)
    run.run(2, [FULL, "ckpt-"], place="epoch", limit=300)
    run.interrupted("epoch", SIGINT, after=rng.randrange(4, 8))
    newest = run.folder / "checkpoints" / f"ckpt-{run.checkpoints()[-1]}.data-00001-of-00002"
    newest.write_bytes(newest.read_bytes()[:-30])
    run.run(0)
    assert_nothing_lost(run, unbroken(2))
    assert run.open_to_all == set()


def test_workers_and_a_server(training, shards, rng):
    """Steps that follow no order have weights of their own: what counts is that all are taken."""
    run = training("--strategy", "parameter_server", "--workers", "2", "--ps", "1")
    run.interrupted("epoch", SIGINT, after=rng.randrange(3, 9))
    chief, server = 0, 3
    run.lost(chief, after=rng.randrange(4))
    run.lost(server, after=rng.randrange(4))
    run.run(2, [FULL, "ckpt-"], place="epoch", limit=1500)
    a_shard_is_damaged(run, shards)
    a_shard_is_cut(run, shards, rank=0)
    run.run(0)
    assert run.checkpoints()[-1] == 30
    assert run.open_to_all == set()
