"""What ``--strategy auto`` takes on GPUs, which nvidia-smi's stand-in says this machine has."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tfdist.errors import LaunchError, ModelError, TfdistError
from tfdist.launch.jobs import Where
from tfdist.planning.advice import advise, fits_on_one
from tfdist.planning.candidates import candidates
from tfdist.planning.devices import DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed, make_rows
from tfdist.records.writing.writer import write
from tfdist.runs import choosing
from tfdist.runs.choosing import fitting
from tfdist.topology.gpus import kind_and_memory

_MODEL = """
from tensorflow import keras

def model_fn():
    hidden = [keras.layers.Dense(512, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model
"""


def _needs(strategy: str, options: dict, devices: int) -> Needs:
    """4 GB of weights and as much of the rest each, of which slots and parts can be divided."""
    if options.get("precision") == "unknown":
        raise ModelError("a model must be planned")
    parts = devices if strategy in ("pipeline", "mesh") else 1
    slots = parts if options.get("shard", "none") == "none" else devices
    return Needs(
        strategy=strategy,
        options=options,
        devices=devices,
        weights=int(4e9 / parts),
        gradients=int(4e9 / parts),
        slots=int(8e9 / slots),
        fixed=0.0,
        per_row=1e7 / devices,
        flops=0.0,
        flops_per_row=1e12,
        summed=int(4e9),
    )


def _find_needs(model, asked, *, rows, on_gpus=True):
    found = []
    for each in asked:
        try:
            found.append(_needs(*each))
        except TfdistError as error:
            found.append(error)
    return found


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Two of them, of a memory that the test says."""

    def have(*lines: str) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return have


@pytest.fixture
def choose(monkeypatch):
    """Returns the choice for 128 rows, and what was told of it."""
    monkeypatch.setattr(choosing, "find_needs", _find_needs)

    def chosen(**where: object) -> tuple[Where, list[str]]:
        told: list[str] = []
        return fitting(Where(**where), "model.py:model_fn", 128, told.append), told

    return chosen


def test_a_device_has_the_memory_that_its_driver_says():
    table = DeviceTable.load()
    found = table.of_driver("NVIDIA A100-SXM4-80GB", 81_920 * 2**20, 4)
    assert (found.device.name, found.devices) == ("a100-80", 4)
    assert found.device.memory == 80 * 2**30
    assert table.of_driver("NVIDIA A100-SXM4-40GB", 40_960 * 2**20, 1).device.name == "a100"
    with pytest.raises(TfdistError, match="found 'NVIDIA GB300'"):
        table.of_driver("NVIDIA GB300", 2**38, 1)


def test_replicas_divide_the_rows_and_nothing_else():
    """16 GB do not depend on the rows, and each has 10 MB of the memory."""
    needs = _needs("single", {}, 1)
    cluster = DeviceTable.load().of_driver("NVIDIA A10G", 20 * 10**9, 2)
    assert cluster.room == 18e9
    assert fits_on_one(needs, cluster, 400)
    assert not fits_on_one(needs, cluster, 402)
    assert not fits_on_one(needs, cluster.of(1), 202)


@pytest.mark.parametrize(
    ("memory", "name"),
    [(20, "mirrored"), (16, "mirrored shard=optimizer"), (11, "mesh model=2"), (4, None)],
)
def test_what_fits_and_is_fastest_is_recommended(memory, name):
    """With 64 rows each 16.6 GB, 12.6 without half of the slots, 8.6 of a model in halves."""
    cluster = DeviceTable.load().of_driver("NVIDIA A10G", memory * 10**9, 2)
    asked = candidates(cluster, 128, several="multi_worker")
    found = _find_needs("", [each.traced for each in asked], rows=128)
    row = advise(make_rows(asked, found, cluster, 128, Speed()), 128).row
    assert (row and row.name) == name


def test_what_fits_is_left_to_the_rank(gpus, choose):
    gpus("NVIDIA A10G, 23028", "NVIDIA A10G, 23028")
    assert kind_and_memory() == ("NVIDIA A10G", 23_028 * 2**20)
    assert choose() == (Where(), [])


def test_what_does_not_fit_is_divided(gpus, choose):
    gpus("NVIDIA A10G, 15000", "NVIDIA A10G, 15000")
    where, (planning, told) = choose(options={"precision": "mixed_float16"})
    assert (where.strategy, where.workers) == ("mirrored", None)
    assert where.options == {"shard": "optimizer", "precision": "mixed_float16", "devices": 2}
    assert "a step of 128 rows does not fit on 2 x a10g as replicas" in planning
    assert told.startswith("strategy mirrored shard=optimizer precision=mixed_float16: a step does")
    assert "(17.3 GB of 14.2 GB)" in told


def test_nothing_fits(gpus, choose):
    gpus("NVIDIA A10G, 1000", "NVIDIA A10G, 1000")
    where, (_, told) = choose()
    assert where == Where()
    assert told.startswith("strategy 'auto' stays with its own choice: nothing fits: the least")


@pytest.mark.parametrize(
    ("lines", "options", "why"),
    [
        (["NVIDIA A10G, 15000"], {"precision": "unknown"}, "a model must be planned."),
        (["NVIDIA A10G, 15000", "NVIDIA T4, 15000"], {}, "of one kind, but found NVIDIA A10G and"),
        (["NVIDIA GB300, 15000"], {}, "found 'NVIDIA GB300'"),
        (["No devices were found"], {}, "nvidia-smi must tell the memory of the GPUs"),
        ([], {}, "nvidia-smi must tell the memory of the GPUs"),
    ],
)
def test_what_cannot_be_planned_is_chosen_as_before(gpus, choose, lines, options, why):
    gpus(*lines)
    where, (told,) = choose(options=options)
    assert where == Where(options=options)
    assert told.startswith("strategy 'auto' cannot tell whether a step fits: ")
    assert why in told
    assert "\n" not in told


def test_a_choice_that_is_made_stays(gpus, choose, monkeypatch):
    gpus("NVIDIA A10G, 1000")
    assert choose(strategy="mirrored") == (Where(strategy="mirrored"), [])
    with pytest.raises(LaunchError, match="'auto' must run in one process"):
        choose(hosts="a:1,b:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose() == (Where(), [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    task = '"task": {"type": "evaluator", "index": 0}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {{"worker": ["a:1", "b:1"]}}, {task}}}')
    assert choose() == (Where(), [])
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert choose() == (Where(), [])


def test_one_process_stays_one(gpus, choose, monkeypatch):
    gpus("NVIDIA A10G, 10000", "NVIDIA A10G, 10000")
    asked = []

    def find_needs(model, each, *, rows, on_gpus):
        asked.extend(strategy for strategy, _, _ in each)
        return _find_needs(model, each, rows=rows)

    monkeypatch.setattr(choosing, "find_needs", find_needs)
    where, _ = choose(workers=1)
    assert (where.strategy, where.workers) == ("mesh", None)
    assert {"single", "mirrored", "mesh"} <= {*asked} <= {"single", "mirrored", "mesh", "pipeline"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_choice_is_trained_with(model, gpus, run_cli, tmp_path, monkeypatch):
    """On a CPU in the end, as there is no GPU. Of 9 MB Adam's slots are half."""
    gpus("NVIDIA A10G, 8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    write((np.ones((64, 64), np.float32), np.arange(64) % 3), tmp_path / "data", split="train=1")
    done = run_cli(
        *("train", "--model", model, "--data", "data", "--output", "run", "--epochs", 1),
        *("--global-batch-size", 16),
        env=os.environ,
        cwd=tmp_path,
        timeout_s=500,
    )
    assert done.returncode == 0, done.stderr
    assert "strategy single offload=optimizer: a step does not fit on one device" in done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["strategy"], config["options"]) == ("single", {"offload": "optimizer"})
