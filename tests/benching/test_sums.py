"""Sizes and bandwidths of sums."""

from __future__ import annotations

import pytest

from tfdist.benching import sums
from tfdist.errors import OptionError


def test_sizes_grow_by_four_to_the_last():
    assert sums.sizes_of("1KiB:64KiB") == [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    assert sums.sizes_of("4:20B") == [4, 16, 20]
    assert sums.sizes_of("1MiB") == [1 << 20]
    assert sums.sizes_of("7:19") == [4, 16]  # Of whole numbers of 4 bytes.


@pytest.mark.parametrize("text", ["", "1KB", "2:1", "1:2:3", "-4", "1KiB:2GiB", "2", "9" * 5000])
def test_what_is_no_size(text):
    with pytest.raises(OptionError, match=r"Write them as --sizes 1KiB:64MiB"):
        sums.sizes_of(text)


def test_each_link_of_a_ring_carries_its_part():
    """Of 4 ranks each sends 6 quarters of the bytes."""
    assert sums.bus_bandwidth(1000, 0.5, 4) == 3000
    assert sums.bus_bandwidth(1000, 0.5, 2) == 2000
