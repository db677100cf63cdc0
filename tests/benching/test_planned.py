"""What a bench has planned, by hand."""

from __future__ import annotations

import pytest

from tfdist.benching import fits, planned
from tfdist.errors import OptionError
from tfdist.planning.needs import Needs

BATCH, GRADIENTS = 32, 4_000_000
#: Seconds of a message over loopback, as the device file has it, and of a byte.
A, B = 50e-6, 1 / 2e9


def measured(strategy: str, devices: int, step_s: float) -> fits.Measured:
    row = fits.Measured(fits.entry_of(strategy, devices))
    row.epoch_seconds, row.samples_per_s = [1.0], [BATCH / step_s]
    return row


def needs(strategy: str = "single", **other) -> Needs:
    more = {"flops": 0.0, "flops_per_row": 1e9, "summed": GRADIENTS} | other
    size = {"weights": GRADIENTS, "gradients": GRADIENTS, "slots": 0, "fixed": 0.0, "per_row": 1e3}
    return Needs(strategy=strategy, **size, **more)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(planned.hosts, "shares", lambda ranks: [[core] for core in range(ranks)])
    monkeypatch.setattr(planned, "visible_gpus", list)


def ring(ranks: int) -> float:
    return 2 * (ranks - 1) * A + 2 * (ranks - 1) / ranks * GRADIENTS * B


def test_each_strategy_is_fitted_to_its_own_row():
    """Messages of horovod take twice what the link says, those of mirrored are all hidden."""
    rows = [
        measured("single", 1, 0.080),
        measured("horovod", 2, 0.040 + 2 * ring(2)),
        measured("mirrored", 2, 0.040),
    ]
    plan = planned.predict(rows, lambda asked: [needs()], BATCH)
    horovod, mirrored = plan.line("horovod"), plan.line("mirrored")
    assert list(horovod) == list(mirrored) == [1, 2, 4, 8, 16, 32]  # Of 64 some would have no row.
    for ranks, speed in horovod.items():
        assert BATCH / speed == pytest.approx(0.080 / ranks + 2 * ring(ranks))
    # As long as computing takes longer, it is all that there is.
    assert BATCH / mirrored[4] == pytest.approx(0.080 / 4, rel=1e-3)
    assert plan.fitted == {("single", 1), ("horovod", 2), ("mirrored", 2)}
    assert plan.line("single") == {1: pytest.approx(BATCH / 0.080)}
    told = plan.to_json()["rows"]
    assert {row["strategy"]: row["sent_bytes"] for row in told if row["devices"] == 4} == {
        "horovod": 2 * 3 / 4 * GRADIENTS,
        "mirrored": 2 * 3 / 4 * GRADIENTS,
    }
    assert "messages from horovod on 2: g = 1 of" in plan.source
    assert "messages 2 times what the link says" in plan.source


def test_a_divided_model_has_a_step_of_its_own():
    """Two stages, four microbatches: a fifth of a step waits. Nothing is fitted to it."""
    rows = [measured("single", 1, 0.080), measured("pipeline", 2, 0.1)]
    crossing = {"crossing": 1e6, "devices": 2}

    def find(asked):
        assert [each.traced[0] for each in asked] == ["single", "pipeline"]
        return [needs(), needs("pipeline", **crossing)]

    plan = planned.predict(rows, find, BATCH)
    (devices, speed), *more = plan.line("pipeline").items()
    assert (devices, more) == (2, [])
    sent = 2 * 4 * A + 1e6 * B
    assert BATCH / speed == pytest.approx(0.080 / 2 / (1 - 1 / 5) + sent)


def test_devices_that_share_all_cores_are_no_more_than_that(monkeypatch):
    """One process has all of them, so that two compute no faster."""
    monkeypatch.setattr(planned.hosts, "shares", lambda ranks: [])
    rows = [measured("horovod", 1, 0.080), measured("horovod", 2, 0.080 + 3 * ring(2))]
    plan = planned.predict(rows, lambda asked: [needs()], BATCH)
    assert plan.line("horovod") == {
        1: pytest.approx(BATCH / 0.080),
        2: pytest.approx(BATCH / (0.080 + 3 * ring(2))),
    }


@pytest.mark.parametrize(
    ("devices", "found", "said"),
    [
        (2, needs(), "name 1 among --workers"),
        (1, OptionError("a step must be a graph"), "a step must be a graph"),
        (1, needs(flops_per_row=0.0), "no products"),
    ],
)
def test_where_nothing_can_be_planned_the_rows_stay(devices, found, said):
    rows = [measured("mirrored", devices, 0.1)]
    plan = planned.predict(rows, lambda asked: [found], BATCH)
    assert plan.rows == ()
    assert said in plan.source


def test_gpus_have_no_names_here(monkeypatch):
    monkeypatch.setattr(planned, "visible_gpus", lambda: ["0"])
    plan = planned.predict([measured("single", 1, 0.1)], lambda asked: [needs()], BATCH)
    assert plan.source.startswith("nothing: of GPUs")
