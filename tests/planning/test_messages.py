"""Messages, computed by hand."""

from __future__ import annotations

import pytest

from tfdist.planning import messages
from tfdist.planning.devices import DeviceTable, Link

# 10 microseconds, and 1 GB/s.
LINK = Link("made up", 1e-5, 1e-9)


def test_a_ring():
    # 6 steps of 10 us, and 2 * 3/4 of 4 MB.
    assert messages.ring(4e6, 4, LINK) == pytest.approx(60e-6 + 6e-3)
    assert messages.gather(4e6, 4, LINK) == pytest.approx(30e-6 + 3e-3)
    assert messages.ring(4e6, 1, LINK) == 0


def test_a_ring_sends_as_much_on_any_number():
    """What the page says of 100 MB over 3.125 GB/s."""
    link = Link("25 Gbit/s", 0.0, 1 / 3.125e9)
    rings = [messages.ring(1e8, ranks, link) for ranks in (2, 64)]
    assert rings == pytest.approx([0.032, 0.063])


def test_hosts_have_links_of_their_own():
    cluster = DeviceTable.load().cluster("p100:3x4")
    within, between = cluster.link, cluster.network
    by_hand = 2 * 3 * within.latency_s + 2 * 3 / 4 * 1e8 * within.seconds_per_byte
    by_hand += 2 * 2 * between.latency_s + 2 * 2 / 3 * 1e8 * between.seconds_per_byte
    assert messages.hierarchical(1e8, cluster) == pytest.approx(by_hand)
