"""Rows, advice and scaling of what a step needs, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tfdist.errors import ModelError
from tfdist.planning.candidates import Candidate, candidates
from tfdist.planning.devices import DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed, make_rows, messages_of, of_all_copies
from tfdist.planning.report import make_plan
from tfdist.planning.scaling import scale
from tfdist.planning.step_time import Overlap

TABLE = DeviceTable.load()


def needs_of(candidate: Candidate, weights: float = 4e8, per_row: float = 1e8, **more) -> Needs:
    """A model of so many bytes of weights, trained with Adam, 100 GFLOP a row."""
    strategy, options, devices = candidate.traced
    parts = devices if candidate.divides_model else 1
    return Needs(
        strategy=strategy,
        options=options,
        devices=devices,
        weights=int(weights / parts),
        gradients=int(weights / parts),
        slots=int(2 * weights / parts),
        fixed=0.0,
        per_row=per_row / devices,
        flops=0.0,
        flops_per_row=1e11,
        summed=0 if candidate.divides_model else int(weights),
        **more,
    )


def plan_of(devices: str, rows: int = 64, speed: Speed | None = None, **size):
    cluster = TABLE.cluster(devices)
    asked = candidates(cluster, rows, several="horovod")
    found = [needs_of(each, **size) for each in asked]
    return make_plan(asked, found, cluster, rows, speed=speed or Speed(), several="horovod")


def test_a_row_by_hand():
    cluster = TABLE.cluster("v100:2")
    candidate = Candidate("mirrored", {}, 2)
    needs = needs_of(candidate)
    (row,) = make_rows([candidate], [needs], cluster, 64, Speed())
    assert row.needs == needs
    assert row.peak == pytest.approx(4 * 4e8 + 64 * 1e8 / 2)
    assert row.fits
    assert row.largest_batch == int((0.9 * 16 * 2**30 - 1.6e9) / 0.5e8)
    assert row.compute_s == pytest.approx(64 * 1e11 / 2 / (0.4 * 15.7e12))
    assert row.sent.size == pytest.approx(4e8)
    assert row.sent.seconds == pytest.approx(2 * 3.4e-6 + 4e8 / 150e9)
    assert row.step_s == pytest.approx(row.compute_s + row.sent.seconds)
    assert row.speed_up == pytest.approx(1)


@pytest.mark.parametrize(
    ("strategy", "options", "seconds"),
    [
        # 3/2 of a ring of 400 MB among 4 over 150 GB/s.
        ("horovod", {"shard": "weights"}, 1.5 * (6 * 3.4e-6 + 1.5 * 4e8 / 150e9)),
        ("mirrored", {"shard": "optimizer"}, 6 * 3.4e-6 + 1.5 * 4e8 / 150e9),
        # 3 buckets of 128 MiB, 6 latencies each.
        ("horovod", {}, 3 * 6 * 3.4e-6 + 1.5 * 4e8 / 150e9),
        # One of 4 workers has the batch; one server.
        ("parameter_server", {}, 2 * 3.4e-6 + 2 * 4e8 / 150e9),
        # A quarter of what crosses on each device.
        ("mesh", {"model": 4}, 3.4e-6 + 6e8 / 4 / 150e9),
        ("mesh", {"model": 2, "batch": 2}, 3.4e-6 + 6e8 / 4 / 150e9),
        # 400 MB in each of two copies, and each half of the weights in a ring of two.
        (
            "mesh",
            {"model": 2, "replicas": "horovod"},
            3.4e-6 + 2 * 4e8 / 4 / 150e9 + 2 * 3.4e-6 + 2e8 / 150e9,
        ),
        # 3 boundaries, 8 microbatches there and back.
        ("pipeline", {"stages": 4, "microbatches": 8}, 16 * 3.4e-6 + 6e8 / 3 / 150e9),
        (
            "pipeline",
            {"stages": 2, "microbatches": 8, "replicas": "horovod"},
            16 * 3.4e-6 + 4e8 / 150e9 + 2 * 3.4e-6 + 2e8 / 150e9,
        ),
    ],
)
def test_messages_of_each_strategy(strategy, options, seconds):
    candidate = Candidate(strategy, options, 4)
    needs = needs_of(candidate, crossing=2e8, crossing_per_row=1e6)
    needs = of_all_copies(needs, candidate, needs_of(Candidate("single")))
    sent = messages_of(needs, candidate, TABLE.cluster("v100:4"), 400)
    assert sent.seconds == pytest.approx(seconds)


def test_replicas_between_hosts_go_over_the_network():
    candidate = Candidate("mesh", {"model": 4, "replicas": "horovod"}, 8)
    needs = of_all_copies(needs_of(candidate), candidate, needs_of(Candidate("single")))
    sent = messages_of(needs, candidate, TABLE.cluster("v100:2x4"), 64)
    assert sent.seconds == pytest.approx(2 * 25e-6 + 4e8 / 3.125e9)


def test_copies_of_a_divided_model_share_its_rows():
    candidate = Candidate("pipeline", {"stages": 2, "microbatches": 8, "replicas": "horovod"}, 4)
    assert candidate.traced == ("pipeline", {"stages": 2, "microbatches": 8}, 2)
    needs = of_all_copies(needs_of(candidate), candidate, needs_of(Candidate("single")))
    assert needs.peak(100) == pytest.approx(4 * 2e8 + 100 * 1e8 / 4)
    assert needs.devices == 4


def test_a_pipeline_waits_in_its_bubble():
    candidate = Candidate("pipeline", {"stages": 4, "microbatches": 8}, 4)
    cluster = TABLE.cluster("v100:4")
    (row,) = make_rows([candidate], [needs_of(candidate)], cluster, 64, Speed())
    assert row.compute_s == pytest.approx(64 * 1e11 / 4 / (0.4 * 15.7e12) * 11 / 8)


def test_what_was_measured_takes_the_place_of_defaults():
    candidate = Candidate("mirrored", {}, 2)
    speed = Speed(share_of_peak=0.1, overlap=Overlap(2.0))
    cluster = TABLE.cluster("v100:2")
    (row,) = make_rows([candidate], [needs_of(candidate)], cluster, 64, speed)
    compute = 64 * 1e11 / 2 / 1.57e12
    assert row.compute_s == pytest.approx(compute)
    assert row.step_s == pytest.approx((compute**2 + row.sent.seconds**2) ** 0.5)


def test_mixed_precision_takes_the_other_rate():
    plain, mixed = Candidate("single"), Candidate("single", {"precision": "mixed_float16"})
    cluster = TABLE.cluster("v100")
    found = [needs_of(plain), needs_of(mixed, half=1.0), needs_of(plain, half=0.5)]
    rows = make_rows([plain, mixed, plain], found, cluster, 64, Speed())
    assert rows[1].speed_up == pytest.approx(125 / 15.7)
    # A model whose file sets the policy says so by its graph; here half is in float32.
    assert rows[2].speed_up == pytest.approx(1 / (0.5 + 0.5 * 15.7 / 125))


def test_what_is_moved_away_travels_there_and_back():
    plain, away = Candidate("single"), Candidate("single", {"offload": "activations"})
    found = [needs_of(plain), needs_of(away, per_row=4e7)]
    rows = make_rows([plain, away], found, TABLE.cluster("v100"), 100, Speed())
    assert rows[1].sent.size == pytest.approx(2 * 100 * 6e7)
    assert rows[1].step_s == pytest.approx(rows[0].step_s + 5.7e-6 + 1.2e10 / 24e9)


def test_a_step_of_few_rows_takes_what_its_gradients_do():
    needs = needs_of(Candidate("single"), per_row=1e6, least=1.7e9)
    assert needs.peak(10) == 1.7e9
    assert needs.peak(200) == pytest.approx(1.6e9 + 2e8)
    assert needs.largest_batch(1.69e9) == 0
    assert needs.largest_batch(1.7e9) == 100
    flat = needs_of(Candidate("single"), per_row=0.0, least=1.7e9)
    assert (flat.largest_batch(1.6e9), flat.largest_batch(2e9)) == (0, None)


def test_a_step_without_products_has_no_known_time():
    cluster = TABLE.cluster("v100:2")
    asked = [Candidate("single"), Candidate("mirrored", {}, 2)]
    found = [replace(needs_of(each), flops_per_row=0.0) for each in asked]
    made = make_plan(asked, found, cluster, 64, speed=Speed(), several="horovod")
    assert made.scaling is None
    assert made.advice.row.candidate == asked[0]
    assert "not known" in made.advice.reason
    assert any(line.startswith("computing: not known") for line in made.sources)


# What is compared ---------------------------------------------------------------------------------


def test_one_device_has_nothing_to_divide():
    assert {each.strategy for each in candidates(TABLE.cluster("t4"), 64, several="horovod")} == {
        "single"
    }


@pytest.mark.parametrize("devices", ["t4:2", "t4:4", "t4:6", "t4:2x1", "t4:2x4", "cpu:2"])
def test_candidates_fill_the_devices(devices):
    cluster = TABLE.cluster(devices)
    found = candidates(cluster, 96, several="multi_worker")
    assert found[0] == Candidate("single")
    names = [(each.strategy, each.describe(), each.devices) for each in found]
    assert len(set(names)) == len(names)
    for each in found:
        assert each.devices in (1, cluster.devices)
        assert each.replicas * each.model_devices == each.devices
        assert each.model_devices <= cluster.per_host or each.options.get("batch", 1) > 1
        if each.strategy == "pipeline":
            assert 96 // each.replicas % each.options["microbatches"] == 0
    several = {each.strategy for each in found} & {"mirrored", "multi_worker"}
    assert ("mirrored" in several) == (cluster.hosts == 1)


# Advice -------------------------------------------------------------------------------------------


def test_several_devices_where_messages_are_cheap():
    made = plan_of("v100:4")
    assert made.advice.row.candidate == Candidate("mirrored", {}, 4)
    assert made.advice.row.speed_up == pytest.approx(3.95, abs=0.05)
    assert "times as fast as one device" in str(made)


def test_one_device_where_messages_cost_more():
    made = plan_of("g5.xlarge:2", rows=1)
    assert made.advice.row.candidate == Candidate("single")
    assert "no more devices are 5 % faster" in made.advice.reason


def test_a_model_that_does_not_fit_on_one_is_not_given_to_replicas():
    made = plan_of("v100:4", weights=6e9)
    by_name = {row.candidate.strategy: row for row in made.rows if not row.candidate.options}
    assert not by_name["single"].fits
    assert not by_name["mirrored"].fits
    assert made.advice.row.candidate.strategy in ("mesh", "pipeline")
    assert "does not fit on one device as it is (30.4 GB of 15.5 GB)" in made.advice.reason


def test_nothing_fits():
    made = plan_of("t4:2", weights=2e10)
    assert made.advice.row is None
    assert made.advice.reason.startswith("nothing fits: the least that a step of 64 rows takes")
    assert made.advice.reason.endswith("take more devices, or those with more memory.")
    made = plan_of("t4", rows=5000)
    assert made.advice.row is None
    assert made.advice.reason.endswith("single takes 128 rows at most.")


def test_asynchronous_steps_are_never_advised():
    cluster = TABLE.cluster("v100:2")
    asked = [Candidate("single"), Candidate("parameter_server", {}, 2)]
    found = [needs_of(each) for each in asked]
    made = make_plan(asked, found, cluster, 64, speed=Speed(), several="horovod")
    assert made.rows[1].speed_up > 1.5
    assert made.advice.row.candidate.strategy == "single"


def test_what_refuses_is_told():
    cluster = TABLE.cluster("v100:2")
    asked = [Candidate("single"), Candidate("mesh", {"model": 2}, 2)]
    refusal = ModelError("a model must be a", received="b", mend="Do c")
    made = make_plan(
        asked, [needs_of(asked[0]), refusal], cluster, 64, speed=Speed(), several="horovod"
    )
    told = made.to_json()
    assert told["rows"][1]["refusal"] == "a model must be a, but found b. Do c."
    assert told["advice"]["strategy"] == "single"
    assert json.loads(json.dumps(told)) == told
    found = [refusal, needs_of(asked[1])]
    made = make_plan(asked, found, cluster, 64, speed=Speed(), several="horovod")
    assert made.advice.reason.startswith("mesh model=2: one device by itself is refused")
    assert made.to_json()["rows"][1]["speed_up"] is None
    made = make_plan(asked, [refusal] * 2, cluster, 64, speed=Speed(), several="horovod")
    assert made.advice.reason.startswith("nothing: every strategy refuses")
    assert made.to_json()["scaling"] == []


# Scaling ------------------------------------------------------------------------------------------


def test_scaling_by_hand():
    made = plan_of("v100:2", rows=64)
    points = {point.devices: point for point in made.scaling.points}
    assert list(points) == [2**power for power in range(11)]
    one = 64 * 1e11 / (0.4 * 15.7e12)
    two = one / 2 + 2 * 3.4e-6 + 4e8 / 150e9
    assert points[1].step_s == pytest.approx(one)
    assert points[2].speed_up == pytest.approx(one / two)
    assert points[2].efficiency == pytest.approx(one / two / 2)
    assert points[2].grown_efficiency == pytest.approx(one / (two + one / 2))
    assert points[2].grown_rows_per_s == pytest.approx(128 / (two + one / 2))
    assert points[4].hosts == 2
    assert points[64].step_s is not None
    assert points[128].step_s is None  # It would have half a row.


def test_where_another_device_stops_to_pay():
    # No messages at all: each adds as much as the first, up to a row each.
    assert plan_of("v100:8", rows=64, weights=0).scaling.last_that_pays == 64
    # A step of 20 ms, and messages of 130 ms between hosts: the first host, and no more.
    assert plan_of("v100:4", rows=1).scaling.last_that_pays == 1
    assert plan_of("v100:4", rows=8).scaling.last_that_pays == 4


def test_a_cpu_is_a_host_where_hosts_are_added():
    scaling = plan_of("cpu:2").scaling
    assert [point.hosts for point in scaling.points[:3]] == [1, 2, 4]
    assert scaling.points[1].grown_efficiency > 0.9


def test_more_devices_do_not_make_shorter_what_is_fixed():
    one, two = Candidate("single"), Candidate("horovod", {}, 2)
    needs = needs_of(one)
    cluster = TABLE.cluster("v100:2")
    plain = make_rows([one, two], [needs, needs], cluster, 64, Speed())
    slow = make_rows([one, two], [needs, needs], cluster, 64, Speed(fixed_s=5.0))
    for before, after in zip(plain, slow, strict=True):
        assert after.compute_s == pytest.approx(before.compute_s + 5.0)
    assert slow[1].speed_up < 1.1 < plain[1].speed_up
    points = scale(needs, cluster, 64, Speed(fixed_s=5.0), "horovod").points
    assert points[1].step_s == pytest.approx(slow[1].step_s, rel=1e-3)  # Messages apart.
