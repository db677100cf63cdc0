"""The GPT of the examples, as a user runs it: on real text, and equal to one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return start(str(_SCRIPT), *arguments)


def start(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(220)
@pytest.mark.long
def test_it_trains_on_two_devices_to_the_weights_of_one():
    done = run("--batch", "1", "--model", "2", "--epochs", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(
        r"is equal: after 20 steps weights differ from one device's by at most (\S+)", done.stdout
    )
    assert found, done.stdout
    assert float(found[1]) <= 1e-5
    losses = [float(loss) for loss in re.findall(r" - loss: (\S+)", done.stdout)]
    # 4.85 is the loss of a guess among 128 characters, 3.37 that of their frequencies.
    assert losses[-1] < 3.0, losses
    assert "The data set " in done.stdout


@pytest.mark.long
@pytest.mark.timeout(220)
def test_it_trains_on_a_grid_of_devices_none_of_which_holds_it():
    launch = ("-m", "tfdist", "launch", "--strategy", "horovod", "--workers", "2", "--")
    done = start(*launch, sys.executable, "-m", "tfdist.examples.gpt_grid", "--steps", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(
        r"is equal: after 10 steps weights differ from one device's by at most (\S+)", done.stdout
    )
    assert found, done.stdout
    assert float(found[1]) <= 1e-5
    whole, limit = map(int, re.search(r"hold (\d+) kB; the limit is (\d+)", done.stdout).groups())
    held = re.findall(r"rank (\d), stage (\d) on CPU:\d: (\d+) kB", done.stdout)
    assert [row[:2] for row in held] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert max(int(kb) for *_, kb in held) <= limit < whole


@pytest.mark.timeout(100)
def test_a_mesh_that_cannot_be_is_one_line():
    done = run("--batch", "0")
    assert done.returncode == 2
    assert "mesh axis 'batch'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
