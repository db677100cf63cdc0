"""tfdist.verify: it finds what is exact, and names the cause where it is not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tfdist.equivalence import LayerDifference, LossComparison, Report

sys.path.append(str(Path(__file__).parent))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("verify_scenarios.py")
_NAMES = re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)


def report(difference: float, loss: float = 0.0, **options) -> Report:
    layers = (LayerDifference("a", 4, difference), LayerDifference("b", 2, 0.0))
    return Report("mirrored", 2, 8, 3, layers, loss, 1e-5, **options)


def test_verdicts():
    assert report(1e-6).exact
    assert not report(1e-4).exact
    assert not report(0.0, loss=1e-4).exact
    assert not report(float("nan")).exact
    assert not report(0.0, loss=float("nan")).exact
    assert report(1e-4, float64_difference=1e-12).exact, "a kink of float32"
    assert not report(1e-4, float64_difference=1e-4).exact
    text = str(report(1e-4, causes=("layer 'x' draws other random numbers",)))
    assert "NOT exact: after 8 steps weights differ by at most 1.0e-04" in text
    assert text.endswith("Cause: layer 'x' draws other random numbers")


@pytest.mark.parametrize(
    ("final", "holds"),
    [(1.0, True), (1.4, True), (0.6, True), (1.9, False), (0.1, False), (float("nan"), False)],
)
def test_asynchronous_losses_are_bound(final, holds):
    losses = LossComparison(initial=2.0, final=final, expected=1.0)
    assert losses.bound == pytest.approx(0.54)
    told = report(0.5, losses=losses, causes=("workers do not wait",))
    assert losses.holds == told.passed == holds
    assert not told.exact
    assert ("NOT within the bound" in str(told)) != holds
    assert str(told).endswith("Why weights differ: workers do not wait")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(_FILE, tmp_path_factory.mktemp("verify"), "mirrored", {"devices": 2})


@pytest.mark.parametrize("name", _NAMES)
def test_on_two_devices(name, job):
    job.check(name)
