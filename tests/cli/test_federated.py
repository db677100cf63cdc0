"""Strategy "federated" on the command line: ``shard --clients``, ``train`` and ``verify``."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_MODEL = f"{_EXAMPLES / 'digits_private.py'}:model_fn"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Ten clients of handwritten digits, and central records to validate on."""
    folder = tmp_path_factory.mktemp("clients") / "fed"
    subprocess.run(
        [sys.executable, "-m", "tfdist", "shard", "digits", folder, "--clients", "10"],
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=True,
    )
    return folder


def train(run_cli, clients, output, *options):
    return run_cli(
        "train",
        *("--model", _MODEL, "--data", clients, "--strategy", "federated"),
        *("--output", output, *options),
    )


def test_a_private_training_is_resumed_and_says_what_it_costs(run_cli, clients, tmp_path):
    output = tmp_path / "run"
    options = ("-o", "dp_noise_multiplier=2", "-o", "dp_clip_norm=1.0", "-o", "local_epochs=2")
    first = train(run_cli, clients, output, "--epochs", 2, *options)
    assert first.returncode == 0, first.stderr
    assert "after 2 rounds epsilon is" in first.stdout
    again = train(run_cli, clients, output, "--epochs", 3, "--resume", *options)
    assert again.returncode == 0, again.stderr
    assert "after 3 rounds epsilon is" in again.stdout
    assert "after 1 rounds epsilon is" not in again.stdout
    with (output / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    epsilons = [float(row["epsilon"]) for row in rows]
    assert epsilons == sorted(epsilons)
    assert {row["clients"] for row in rows} == {"10.0"}
    summary = json.loads((output / "metrics.json").read_text())
    assert set(summary["train"]) == set(summary["validation"]) == {"loss", "accuracy"}
    assert summary["last_epoch"]["epsilon"] == epsilons[-1]
    assert 0 < summary["data_wait"] < 1


@pytest.mark.long
def test_what_is_exact_is_verified(run_cli, clients):
    options = ("--data", clients, "--strategy", "federated", "--steps", 3)
    exact = run_cli("verify", "--model", _MODEL, *options, "-o", "algorithm=fedsgd")
    assert exact.returncode == 0, exact.stdout + exact.stderr
    differs = run_cli("verify", "--model", _MODEL, *options, "-o", "local_batch_size=20")
    assert differs.returncode == 1, differs.stdout + differs.stderr
    assert "steps apart" in " ".join(differs.stdout.split())


def test_an_option_that_cannot_hold_is_one_line(run_cli, clients, tmp_path):
    wrong = train(run_cli, clients, tmp_path / "run", "-o", "dropout_rate=1.5")
    assert wrong.returncode == 2
    assert len(wrong.stderr.strip().splitlines()) == 1
    assert "dropout_rate must be a number" in wrong.stderr
