"""The time of a step: by hand, and against what Horovod has published."""

from __future__ import annotations

import pytest

from tfdist.planning.devices import DeviceTable
from tfdist.planning.plan import summed
from tfdist.planning.step_time import Overlap, bubble, buckets_of, fit_overlap


def test_one_after_the_other():
    assert Overlap(1.0).step_seconds(3, 4) == pytest.approx(7)
    assert Overlap(2.0).step_seconds(3, 4) == pytest.approx(5)
    assert Overlap(64.0).step_seconds(3, 4) == pytest.approx(4)
    assert Overlap(1.0, slower=2.0).step_seconds(3, 4) == pytest.approx(11)
    assert Overlap(2.0).step_seconds(0, 0) == 0


def test_one_bucket_waits_for_all_gradients():
    assert Overlap().step_seconds(3, 4, buckets=1) == pytest.approx(7)


def test_buckets_by_hand():
    # 1 s forward, 2 s back in 4 parts of 0.5 s: 4 messages of 0.25 s, the last after all parts.
    assert Overlap().step_seconds(3, 1, buckets=4) == pytest.approx(1 + 2 + 0.25)
    # Messages of 2 s begin after the first part, and follow each other.
    assert Overlap().step_seconds(3, 8, buckets=4) == pytest.approx(1 + 0.5 + 8)


@pytest.mark.parametrize("exponent", [1.0, 1.5, 3.0])
def test_the_exponent_is_found_again(exponent):
    together = Overlap(exponent).step_seconds(0.3, 0.2)
    found = fit_overlap(0.3, together, 0.2)
    assert found.exponent == pytest.approx(exponent, rel=1e-6)
    assert found.slower == pytest.approx(1)


def test_a_slower_link_than_told_is_found():
    found = fit_overlap(0.3, 0.9, 0.2)
    assert (found.exponent, found.slower) == (1.0, pytest.approx(3))
    assert found.step_seconds(0.3, 0.2) == pytest.approx(0.9)


def test_messages_that_cost_nothing():
    assert fit_overlap(0.3, 0.3, 0.2).step_seconds(0.3, 0.2) == pytest.approx(0.3, rel=1e-3)
    assert fit_overlap(0.3, 0.4, 0.0).step_seconds(0.3, 0.0) == pytest.approx(0.3)


def test_a_bubble():
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert bubble(1, 8) == 0


def test_buckets():
    assert [buckets_of(size, 64) for size in (0, 64, 65)] == [1, 1, 2]
    assert buckets_of(1000, None) == 1


@pytest.mark.parametrize(
    ("parameters", "images_per_s", "published"),
    [
        (23.85e6, 142, 0.90),  # Inception V3
        (44.55e6, 1656.82 / 16, 0.90),  # ResNet-101
        (138.36e6, 154, 0.68),  # VGG-16
    ],
)
def test_horovods_published_scaling(parameters, images_per_s, published):
    """On 128 hosts of 4 P100 with 25 Gbit/s: docs/benchmarks.rst of Horovod.

    Nothing is fitted. Images a second of a P100 with 64 rows: TensorFlow's benchmarks of 2017
    (Inception V3, VGG-16), and of ResNet-101 Horovod's own on 16 GPUs, same page. Gradients of
    float32 travelled in 64 MiB then (HOROVOD_FUSION_THRESHOLD, docs/tensor-fusion.rst).
    """
    cluster = DeviceTable.load().cluster("p100:128x4")
    compute = 64 / images_per_s
    sent = summed(4 * parameters, cluster, 64 * 2**20)
    efficiency = compute / Overlap().step_seconds(compute, sent.seconds, sent.buckets)
    assert efficiency == pytest.approx(published, abs=0.05)
