"""tfdist.verify: equal, rounding alone, or different, and then it names the cause."""

from __future__ import annotations

import pytest
from scenario_plugin import Job

from tfdist.equivalence import Explanation, LayerDifference, LossComparison, Report

SCENARIOS = "verify_scenarios.py"
JOBS = {"mirrored": Job("mirrored", {"devices": 2})}


def layers(*differences: float) -> tuple[LayerDifference, ...]:
    return tuple(LayerDifference(f"l{n}", 3, each) for n, each in enumerate(differences))


def report(difference: float, loss: float = 0.0, **options) -> Report:
    return Report("mirrored", 2, 8, 3, layers(difference, 0.0), loss, 1e-5, **options)


def test_verdicts():
    assert report(1e-6).exact
    assert not report(1e-4).exact
    assert not report(0.0, loss=1e-4).exact
    assert not report(float("nan")).exact
    assert not report(0.0, loss=float("nan")).exact
    assert report(1e-6).verdict == "equal"
    assert str(report(1e-6)).startswith("mirrored on 2 replicas is equal: after 8 steps weights")
    text = str(report(1e-4, causes=("layer 'x' draws other random numbers",)))
    assert (
        "replicas differs: after 8 steps weights differ from one device's by at most 1.0e-04"
        in text
    )
    assert text.endswith("Cause: layer 'x' draws other random numbers")


def test_rounding_is_measured_by_layer_and_is_the_largest_of_trainings():
    rounded = [(layers(2e-5, 0.0), 0.0), (layers(5e-5, 0.0), 3e-5)]
    found = report(1e-4, loss=5e-5).beside(rounded)
    assert found.verdict == "rounds"
    assert found.passed
    assert str(found).endswith(
        "by at most 1.0e-04 and the loss by 5.0e-05 (tolerance 1e-05); rounding alone makes one "
        "device's differ by 5.0e-05 and the loss by 3.0e-05"
    )
    fault = report(1e-4, loss=5e-5).beside([(layers(1e-6, 1e-2), 1e-2)])
    assert fault.verdict == "differs", "what another layer rounds to hides nothing"
    assert str(fault).endswith(
        ", and furthest beyond that is layer 'l0' with 1.0e-04 where rounding makes 1.0e-06. "
        "Cause: none known"
    )
    of_loss = report(1e-4, loss=1e-3).beside(rounded)
    assert of_loss.verdict == "differs"
    assert "furthest" not in str(of_loss)
    nan = float("nan")
    assert report(nan).beside(rounded).verdict == "differs"
    assert report(1e-4).beside([(layers(nan, nan), None)] * 2).verdict == "differs"


def test_what_differs_by_nature_is_said_first():
    nature = "clients take steps apart"
    found = report(1e-2, causes=(nature, "layer 'x' draws"), by_nature=(nature,))
    told = str(found)
    assert told.startswith(
        "mirrored on 2 replicas differs, and must as it is set up (clients take steps apart): "
        "after 8 steps"
    )
    assert told.endswith("Cause: layer 'x' draws")
    assert found.is_explained
    assert not report(1e-2).is_explained
    assert not report(float("nan"), causes=(nature,)).is_explained
    assert not report(0.0).is_explained


def test_an_explanation_names_the_first_step_and_layer():
    told = Explanation((), 2, (1, 2, 4), (layers(0, 0), layers(0, 1e-6), layers(0, 1e-4)), 1e-5)
    assert str(told).splitlines() == [
        "Outputs: no layer gives other rows when the batch is in 2 parts, as far as could be tried",
        "Weights: equal after 2 steps, apart after 4 steps, first those of layer 'l1' (by 1.0e-04)",
    ]
    told = Explanation((("a", 0.5), ("b", 0.25)), 3, (1,), (layers(float("nan"), 1.0),), 1e-5)
    assert str(told).splitlines() == [
        "Outputs: layer 'a' is the first that gives other rows when the batch is in 3 parts (by "
        "5.0e-01 of its largest), then 'b' (2.5e-01)",
        "Weights: apart after 1 step, first those of layer 'l0' (by nan)",
    ]
    told = Explanation((), 2, (1, 2), (layers(0, 0), layers(0, 1e-6)), 1e-5)
    assert str(told).endswith("Weights: equal to 1e-05 after 2 steps")


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


def test_on_two_devices(scenario):
    scenario.check()
