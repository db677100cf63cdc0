"""How unequal clients are: the numbers, the tables and the picture."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import OptionError
from tfdist.records.clients.skew import measure_skew

COUNTS = [{0: 5, 1: 5}, {0: 10}, {1: 10}, None]


@pytest.fixture
def skew():
    return measure_skew(
        ["a", "b", "c", "bad"],
        [10, 10, 10, 0],
        COUNTS,
        class_names=["cat", "dog"],
        partition="shards:2",
    )


def test_distances_from_all_together(skew):
    assert skew.distances[:3].tolist() == [0, 0.5, 0.5]
    assert np.isnan(skew.distances[3])
    assert skew.counts.tolist() == [[5, 5], [10, 0], [0, 10], [0, 0]]


def test_it_prints_clients_and_classes(skew):
    text = str(skew)
    assert text.startswith("4 clients, 30 records, shards:2")
    for word in ("cat", "dog", "label skew", "bad", "0.50"):
        assert word in text


def test_without_class_ids():
    skew = measure_skew(["a", "b"], [3, 4], [None, None])
    assert skew.distances is None
    assert "3.5" in str(skew)


def test_many_clients_and_classes_are_cut(tmp_path):
    number = 150
    skew = measure_skew(
        [f"client-{n}" for n in range(number)],
        [40] * number,
        [{n % 40: 30, (n + 1) % 40: 10} for n in range(number)],
    )
    assert "and 130 more" in str(skew)
    assert "39 (75%)" not in str(skew)
    assert "19 (75%)" in str(skew)
    skew.plot(tmp_path / "skew.png")
    assert Image.open(tmp_path / "skew.png").size == (1100, 650)


def test_ids_beyond_the_names_and_gaps():
    skew = measure_skew(["a"], [2], [{3: 1, 700: 1}], class_names=["x"])
    assert skew.class_names == ("3", "700")


def test_the_picture_shows_each_class(skew, tmp_path):
    skew.plot(tmp_path / "skew.png")
    pixels = np.asarray(Image.open(tmp_path / "skew.png").convert("RGB")).reshape(-1, 3)
    colors = {tuple(color) for color in np.unique(pixels, axis=0).tolist()}
    assert {(31, 119, 180), (255, 127, 14)} <= colors
    assert [path.name for path in tmp_path.iterdir()] == ["skew.png"]
    for wrong in (tmp_path / "skew.pdf", tmp_path / "no" / "skew.png"):
        with pytest.raises(OptionError, match=r"\.png file in a folder that exists"):
            skew.plot(wrong)
