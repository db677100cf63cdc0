"""The options of the train step: their values, and what they do on each engine.

The scenarios stand in options_scenarios.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies import known_options, parse_options
from tfdist.training.options import StepOptions

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("options_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)
_STEP = {"precision", "accumulate_steps", "recompute", "sync_batch_norm"}


@pytest.mark.parametrize("name", ["single", "mirrored", "horovod", "multi_worker"])
def test_strategies_that_divide_batches_have_them_all(name):
    assert set(known_options(name)) >= _STEP | {"lr_scaling", "warmup_epochs"}
    with pytest.raises(OptionError, match=r"unknown precision.*Known: float32, mixed_bfloat16"):
        tfdist.strategy(name, precision="float16")


def test_other_strategies_have_what_they_can():
    for name in ("mesh", "pipeline"):
        assert "precision" in known_options(name)
        with pytest.raises(OptionError, match="unknown precision"):
            tfdist.strategy(name, precision="float16")
    with pytest.raises(OptionError, match=r"option of strategy 'mesh'.*'accumulate_steps'"):
        tfdist.strategy("mesh", accumulate_steps=2)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 0},
        {"accumulate_steps": 1.5},
        {"accumulate_steps": True},
        {"sync_batch_norm": "yes"},
        {"recompute": True},
        {"recompute": ["dense", 3]},
        {"precision": "mixed"},
    ],
    ids=str,
)
def test_values_that_cannot_hold(options):
    with pytest.raises(OptionError):
        StepOptions(**options)


def test_on_the_command_line():
    pairs = ["recompute=none", "precision=mixed_float16", "sync_batch_norm=false"]
    options = StepOptions(**parse_options("mirrored", pairs))
    assert not options.recomputes
    assert not options.sync_batch_norm
    named = StepOptions(**parse_options("mirrored", ["recompute=encoder1,encoder2"]))
    assert named.recomputed_layers == ("encoder1", "encoder2")
    assert StepOptions(recompute="blocks").recomputed_layers is None
    assert StepOptions(recompute=["a", "b"]).recomputed_layers == ("a", "b")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return {
        "single": Job(_FILE, folder("single"), "single"),
        "mirrored": Job(_FILE, folder("mirrored"), "mirrored", {"devices": 2}),
        "horovod": Job(_FILE, folder("horovod"), "horovod", {"stall_timeout_s": 20}, ranks=2),
        "multi_worker": Job(_FILE, folder("multi_worker"), "multi_worker", ranks=2),
    }


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("strategy", ["single", "mirrored", "horovod", "multi_worker"])
def test_on(strategy, name, jobs):
    jobs[strategy].check(name)
