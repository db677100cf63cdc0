"""The fuzzer sees every way in which a reader can end, and damages alike for the same seed."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import fuzzing
import mutations

READERS = """
import os, signal, time
from fuzzing import Refused, Target, Wrong, cli
from mutations import flip_bits
from tfdist.errors import DataError

def targets(folder):
    file = folder / "file"
    file.write_bytes(bytes(100))

    def reads():
        assert file.read_bytes() != bytes(100)

    def refuses():
        raise DataError("a file must be whole", received="a bit")

    def says_what_cannot_be_shown():
        raise Refused("\\ud800")  # What a TfdistError says can always be shown.

    def is_wrong():
        raise Wrong("other bytes")

    uses = {
        "reads": reads, "refuses": refuses, "wrong": is_wrong,
        "complains": says_what_cannot_be_shown,
        "fails": lambda: 1 / 0, "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "waits": lambda: time.sleep(600), "command": lambda: cli("inspect", file),
        "bad command": lambda: cli("shard"),
    }
    return [
        Target(kind=kind, file=file, mutations=[flip_bits], use=use, limit_s=3)
        for kind, use in uses.items()
    ]
"""


@pytest.mark.timeout(120)
def test_every_outcome_is_told(tmp_path):
    (tmp_path / "readers.py").write_text(READERS)
    report = fuzzing.fuzz(tmp_path / "readers.py", 2)
    found = {kind: dict(counts) for kind, counts in report.counts.items()}
    assert found == {
        "reads": {"read": 2},
        "refuses": {"refused in one line": 2},
        "complains": {"traceback": 2},
        "wrong": {"silently wrong": 2},
        "fails": {"traceback": 2},
        "dies": {"crash": 2},
        "waits": {"hang": 2},
        "command": {"refused in one line": 2},
        "bad command": {"refused in one line": 2},
    }
    assert len(report.bad) == 10
    assert "reads" in str(report)
    assert all(outcome in str(report) for outcome in fuzzing.OUTCOMES)


def test_a_mutation_depends_on_its_seed_alone(tmp_path):
    file = tmp_path / "document.json"

    def mutated(seed):
        file.write_text(json.dumps({"a": [1, {"b": "x"}], "c": {"d": [{"e": 1.5}, None]}}))
        rng = random.Random(seed)
        rng.choice(mutations.JSON)(file, rng)
        return file.read_bytes()

    seeds = range(800)
    there = [mutated(seed) for seed in seeds]
    back = [mutated(seed) for seed in reversed(seeds)]
    assert there == back[::-1]
