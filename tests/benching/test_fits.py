"""Rows of a bench, and the numbers that are told of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tfdist.benching import fits
from tfdist.errors import OptionError, RankFailedError
from tfdist.runs.settings import Settings


def test_each_strategy_has_the_devices_that_it_can_divide():
    found = fits.entries(["single", "mirrored", "single", "horovod", "pipeline"], [1, 2, 4])
    assert [(entry.strategy, entry.devices) for entry in found] == [
        ("single", 1),
        *(("mirrored", number) for number in (1, 2, 4)),
        *(("horovod", number) for number in (1, 2, 4)),
        ("pipeline", 2),
    ]
    assert found[2].where.options == {"devices": 2}
    assert found[5].where.workers == 2
    assert found[7].where.options == {"stages": 2, "microbatches": 4}


def test_what_cannot_be_a_row():
    with pytest.raises(OptionError, match="single, mirrored, horovod"):
        fits.entries(["singel"], [1])
    with pytest.raises(OptionError, match=r"'single' must be given a number.*--workers 2,4"):
        fits.entries(["single"], [2, 4])


@pytest.fixture
def rows():
    single, two, refused = (
        fits.Measured(entry) for entry in fits.entries(["horovod", "mesh"], [1, 2])
    )
    single.epoch_seconds, single.samples_per_s = [1.0, 2.0, 4.0], [400.0, 200.0, 100.0]
    two.epoch_seconds, two.samples_per_s = [1.0, 1.25], [400.0, 320.0]
    refused.refused = OptionError("a mesh must fit")
    return [single, two, refused]


def test_speed_up_is_over_one_device_by_medians(rows):
    base, gains = fits.speed_up(rows)
    assert base is rows[0]
    assert gains == {0: 1.0, 1: 1.8}
    assert rows[0].spread == 1.5
    base, gains = fits.speed_up(rows[1:])  # Where none has one device.
    assert base is rows[1]
    assert gains == {0: 1.0}


def test_what_makes_a_table_untrue_is_said(rows, monkeypatch):
    monkeypatch.setattr(fits.hosts, "physical_cores", lambda: 1)
    shared, busy, wide = fits.notes(rows, 3.0)
    assert shared.startswith("2 devices share 1 cores")
    assert busy.startswith("others wanted 3.0 cores")
    assert wide == "epochs of horovod on 1, horovod on 2 differ by more than 20 %"
    monkeypatch.setattr(fits.hosts, "physical_cores", lambda: 2)
    rows[0].samples_per_s = rows[1].samples_per_s = [100.0, 101.0]
    assert fits.notes(rows, 0.1) == []


def test_a_rank_that_fails_spoils_its_own_row_alone(monkeypatch, tmp_path):
    """What is told of the others was measured, and stays."""

    epochs = [{"seconds": 9.0, "samples_per_s": 1.0}, {"seconds": 2.0, "samples_per_s": 50.0}]
    summary = {"replicas": 1, "validation": {"loss": 1.0}}
    run = SimpleNamespace(history=epochs, summary=summary)

    def carry_out(config, where, *more, **others):
        if where.strategy == "horovod":
            raise RankFailedError("rank 0 ended", 137)
        return run

    monkeypatch.setattr(fits, "training_config", lambda where, **given: given)
    monkeypatch.setattr(fits, "carry_out", carry_out)
    found = fits.entries(["single", "horovod"], [1])
    asked = {"model": "m.py:f", "data": "d", "settings": Settings(epochs=2), "folder": tmp_path}
    single, horovod = fits.run(found, rounds=2, **asked)
    assert (single.samples_per_s, single.has_failed) == ([50.0, 50.0], False)
    assert (horovod.samples_per_s, horovod.has_failed) == ([], True)
    with pytest.raises(RankFailedError):
        fits.run(found[1:], rounds=2, **asked)


def test_devices_have_cores_of_their_own():
    import os

    before = os.sched_getaffinity(0)
    with fits._on_cores([[min(before)]]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with pytest.raises(OptionError, match="devices must have cores of their own"):
        fits._shares(2, len(before))
