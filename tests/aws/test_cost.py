"""Money, time and carbon, computed by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from tfdist.aws.cost import Speed, against_one, estimate, last_that_pays, read_measurement
from tfdist.aws.instances import CarbonTable, Instance
from tfdist.errors import DataError, OptionError

INSTANCE = Instance(name="ml.x", vcpus=8, gpus=0, usd_per_hour=2.0, watts=500)
CARBON = CarbonTable("2023", "made up", 1.2, {"here": 0.5})


def test_one_instance_by_hand():
    found = estimate(
        Speed({1: 1000.0}),
        1,
        records=360_000,
        epochs=20,
        instance=INSTANCE,
        carbon=CARBON,
        region="here",
    )
    assert found.seconds_per_epoch == 360
    assert found.hours == 2
    assert found.usd == 4
    assert found.usd_per_epoch == 0.2
    assert found.kg_co2 == pytest.approx(2 * 0.5 * 0.5 * 1.2)


def test_each_instance_is_paid_for_while_it_starts():
    common = {"records": 1000, "epochs": 2, "instance": INSTANCE, "carbon": CARBON}
    common |= {"region": "here", "start_s": 1800.0}
    one, four = (estimate(Speed({1: 1000.0}, efficiency=1.0), count, **common) for count in (1, 4))
    assert one.hours == pytest.approx(0.5 + 2 / 3600)
    assert four.usd == pytest.approx(4 * (0.5 + 0.5 / 3600) * 2)
    more = against_one(one, four)
    assert more["hours"] == pytest.approx(-1.5 / 3600)
    assert more["usd"] == pytest.approx(3)
    assert more["kg_co2"] == pytest.approx(1.5 * 0.5 * 0.6)


def test_an_assumed_efficiency_holds_for_each_doubling():
    speed = Speed({1: 100.0}, efficiency=0.9)
    assert speed.samples_per_s(2) == pytest.approx(180)
    assert speed.samples_per_s(4) == pytest.approx(324)
    assert Speed({0.25: 100.0}, efficiency=0.9).samples_per_s(1) == pytest.approx(324)
    assert Speed({2: 180.0}, efficiency=0.9).samples_per_s(1) == pytest.approx(100)


def test_several_measurements_are_fitted_by_amdahl():
    def true(instances):
        return 1 / (0.01 / instances + 0.001)

    speed = Speed({1: true(1), 2: true(2), 4: true(4)})
    for instances in (1, 2, 3, 8, 64):
        assert speed.samples_per_s(instances) == pytest.approx(true(instances))
    assert "fitted" in speed.describe()


def test_a_superlinear_measurement_is_fitted_without_a_negative_part():
    speed = Speed({1: 100.0, 2: 210.0})
    assert speed.samples_per_s(1000) > speed.samples_per_s(10) > 0


def test_diminishing_returns():
    assert last_that_pays(Speed({1: 100.0}, efficiency=1.0), 16) == 16
    found = last_that_pays(Speed({1: 1 / 1.1, 2: 1 / 0.6}), 16)
    speeds = [1 / (1 / n + 0.1) for n in range(1, 17)]
    added = [b - a for a, b in itertools.pairwise(speeds)]
    assert found == next(n for n, more in enumerate(added, 1) if more < 0.5 * speeds[0])


@pytest.mark.parametrize("measured", [{}, {0: 1.0}, {1: 0.0}])
def test_what_is_no_measurement(measured):
    with pytest.raises(OptionError):
        Speed(measured)
    with pytest.raises(OptionError):
        Speed({1: 1.0}, efficiency=0.4)


def test_measurements_are_read_from_both_kinds_of_files(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"samples_per_s": 12.5, "replicas": 2}))
    assert read_measurement(path) == (12.5, 2)
    # The first epoch traces the step.
    path.write_text(json.dumps([{"samples_per_s": s} for s in (1, 10, 30, 20)]))
    assert read_measurement(path) == (20, 0)
    for text in ("{}", "[]", "no", "[1]"):
        path.write_text(text)
        with pytest.raises(DataError):
            read_measurement(path)
