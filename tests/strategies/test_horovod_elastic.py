"""Elastic Horovod: ranks are killed and join in the middle of a fit (``elastic_fit.py``)."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

from tfdist.compat.keras import VARIABLE
from tfdist.strategies.horovod.ring import Ring, World
from tfdist.training.engine.elastic_collective import ProcessLost

sys.path.append(str(Path(__file__).parent))

import elastic_moments

# TensorFlow is imported by each rank, on a machine that may be busy.
pytestmark = [pytest.mark.honest_start, pytest.mark.timeout(280)]
_SCRIPT = Path(__file__).with_name("elastic_fit.py")
_TOLERANCE = 1e-6


def test_a_rank_that_is_lost_is_known_by_what_gloo_says():
    """Of some losses TensorFlow hears from Gloo alone, without a word of Horovod's."""
    gloo = "[/build/third_party/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:4002: Reset"
    text = f"Graph execution error:\n\nDetected at node sum defined at:\n{gloo}\n\t [[node sum]]"
    engine = SimpleNamespace(Average=1, Adasum=2, Compression=SimpleNamespace(none=None))
    ring = Ring(engine, World(2, 1), op="average", compression="none", stall_timeout_s=60)
    error = ring.explain(tf.errors.UnknownError(None, None, text))
    assert isinstance(error, ProcessLost)
    assert "rank 1 left waiting: Gloo: Read error [127.0.0.1]:4002: Reset." in str(error)
    assert ring.explain(tf.errors.UnknownError(None, None, "a user's file /gloo/x.cc")) is None


@dataclass
class Ended:
    """What an elastic fit left."""

    folder: Path
    code: int
    output: str

    def found(self) -> dict:
        assert self.code == 0, self.output[-3000:]
        return json.loads((self.folder / "found.json").read_text())


def fit(folder: Path, *launch: str, kills: tuple[str, ...] = (), env: dict[str, str]) -> Ended:
    command = [sys.executable, "-m", "tfdist", "launch", "--workers", "2", "--min-workers", "1"]
    done = subprocess.run(
        [*command, *launch, "--", sys.executable, str(_SCRIPT), str(folder), *kills],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=260,
        check=False,
    )
    return Ended(folder, done.returncode, done.stdout + done.stderr)


def check_unbroken(found: dict) -> None:
    """One device comes to the same on the global batches of two ranks; records count once."""
    assert found["weights"] < _TOLERANCE
    assert found["predictions"] < 10 * _TOLERANCE
    assert found["epochs"] == [0, 1, 2]
    assert found["history"]["rows"] == [75.0] * 3
    for name, values in found["expected"].items():
        np.testing.assert_allclose(found["history"][name], values, atol=1e-5)


def steps_told(found: dict) -> list[list[int]]:
    """The batches of each epoch that callbacks were told of."""
    told: list[list[int]] = []
    for what, *values in found["told"]:
        if what == "epoch":
            assert values[0] == len(told)
            told.append([])
        elif what == "step":
            told[-1].append(values[0])
    return told


@pytest.mark.parametrize("legacy", ["1", *long("0")], ids=["keras 2", "keras 3"])
def test_a_killed_rank_is_survived(tmp_path, legacy):
    """In the second epoch, after its 4th step; the last commit was after the 3rd."""
    env = {"OPTIONS": json.dumps({"lr_scaling": "linear"}), VARIABLE: legacy}
    ended = fit(tmp_path, kills=("rank=1,step=14",), env=env)
    found = ended.found()
    check_unbroken(found)
    assert found["ranks"] == 1
    assert set(found["listening"]) == {"127.0.0.1"}
    whole = list(range(10))
    assert steps_told(found) == [whole, [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9], whole]
    assert [event[0] for event in found["told"]].count("train") == 1
    # The rule's rate belongs to the global batch, which stays.
    np.testing.assert_allclose(found["history"]["learning_rate"], [0.02] * 3)
    assert "rank 1 on localhost was lost (exit code 137 (SIGKILL))" in ended.output
    assert "going on with 1 worker" in ended.output
    assert "Traceback" not in ended.output


def test_the_chief_is_lost_and_a_worker_joins(tmp_path):
    """Rank 1 becomes the chief: it writes and prints on. The new one has all that came before.

    It is lost in turn, in the prediction after the fit.
    """
    slots, script = tmp_path / "slots", tmp_path / "discover"
    slots.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat '{slots}'\n")
    script.chmod(0o755)

    def offer_again() -> None:
        while not (tmp_path / "killed.0").exists() and not over.wait(0.1):
            pass
        slots.write_text("localhost:3\n")

    over = threading.Event()
    offering = threading.Thread(target=offer_again)
    offering.start()
    try:
        ended = fit(
            tmp_path,
            *("--max-workers", "3", "--host-discovery", str(script)),
            kills=("rank=0,step=5", "rank=1,predict=2"),
            env={"AWAIT_ANOTHER": "1", "OPTIONS": json.dumps({"lr_scaling": "linear"})},
        )
    finally:
        over.set()
        offering.join()
    found = ended.found()
    check_unbroken(found)
    assert found["ranks"] == 1
    ranks = [(event[2], event[3]) for event in found["told"] if event[0] == "step"]
    assert list(dict.fromkeys(ranks)) == [(1, 2), (0, 1), (0, 2)]
    assert [sorted(set(steps)) for steps in steps_told(found)] == [list(range(10))] * 3
    assert "rank 0 on localhost was lost" in ended.output
    assert "1 worker joined; going on with 2 workers" in ended.output
    assert "rank 1 on localhost was lost" in ended.output
    # Who prints and writes: the one that became the chief.
    assert "[1] 10/10" in ended.output
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert sorted(path.stem for path in (tmp_path / "checkpoints").glob("*.index")) == [
        "ckpt-24",
        "ckpt-28",
        "ckpt-30",
    ]


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("after", ["met", "connect"])
def test_losses_while_the_ranks_meet(tmp_path, after):
    """``elastic_moments.py`` tries as many as it is told to; here two, with two losses each."""
    moment = elastic_moments.Moment(after, 1, (0.0, 0.3))
    outcome = elastic_moments.run(moment, tmp_path, random.Random(0))
    assert outcome.survived, (outcome.struck, outcome.output[-3000:])
    assert outcome.struck
    assert "was lost (exit code 137 (SIGKILL)" in outcome.output
