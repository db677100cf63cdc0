"""Mirrored: which devices; what its fit does is in tests/training and tests/conformance."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfdist.errors import OptionError
from tfdist.strategies.mirrored import choose_devices


@pytest.mark.parametrize(
    ("gpus", "devices", "chosen"),
    [
        ([], None, ["CPU:0", "CPU:1"]),
        ([], 3, ["CPU:0", "CPU:1", "CPU:2"]),
        (["GPU:0"], None, ["GPU:0"]),
        (["GPU:0", "GPU:1", "GPU:2"], None, ["GPU:0", "GPU:1", "GPU:2"]),
        (["GPU:0", "GPU:1", "GPU:2"], 2, ["GPU:0", "GPU:1"]),
    ],
)
def test_all_gpus_or_logical_cpus(gpus, devices, chosen):
    assert choose_devices(gpus, devices) == chosen


def test_more_devices_than_gpus_say_how_to_go_on():
    with pytest.raises(OptionError, match=r"devices=3 with 2 GPUs.*CUDA_VISIBLE_DEVICES=-1"):
        choose_devices(["GPU:0", "GPU:1"], 3)


def test_more_logical_cpus_than_a_machine_holds_are_refused_at_once():
    with pytest.raises(OptionError, match="stages must be at most 256 where no GPU is visible"):
        choose_devices([], 1_000_000, option="stages")


def test_devices_are_taken_before_tensorflow_has_made_its_own():
    program = (
        "import tensorflow as tf, tfdist\n"
        "from tfdist.errors import OptionError\n"
        "tf.zeros(1)\n"
        "try:\n"
        "    tfdist.strategy('mirrored').start()\n"
        "except OptionError as error:\n"
        "    assert 'at the start of the program' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('it must be refused')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
