"""Presets that change images at random: what they change, and what they keep."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError, OptionError
from tfdist.records import open_records
from tfdist.records.reading.augmentation import parse_presets

SEEDS = tf.constant(np.random.default_rng(0).integers(-(2**31), 2**31, (60, 2)), tf.int32)
RNG = np.random.default_rng(1)
COLOUR = RNG.integers(0, 256, (16, 24, 3), np.uint8)


def changed(presets, image, labels=(0,)):
    """Returns the image under each of the seeds."""
    record_fn = tfdist.augment(presets)
    each = tf.function(lambda seed: record_fn(tf.constant(image), *labels, seed=seed)[0])
    return np.stack([each(seed) for seed in SEEDS])


def test_flip_exchanges_left_and_right_in_half_of_them():
    found = changed("flip", COLOUR)
    flipped = (found == COLOUR[:, ::-1]).all((1, 2, 3))
    assert ((found == COLOUR).all((1, 2, 3)) | flipped).all()
    assert 15 < flipped.sum() < 45


def test_crop_moves_by_at_most_an_eighth_of_the_size():
    # A pixel tells where it comes from; those of the border are mirrored inwards.
    image = np.zeros((16, 24, 1), np.float32) + np.arange(16)[:, None, None]
    found = changed("crop", image.astype(np.float32))
    assert found.shape == (60, 16, 24, 1)
    moved = found[:, 8, 12, 0] - 8
    assert set(moved) == {-2, -1, 0, 1, 2}
    for one, shift in zip(found[..., 0], moved, strict=True):
        rows = np.abs(np.arange(16) + shift)
        np.testing.assert_array_equal(one[:, 0], np.where(rows > 15, 30 - rows, rows))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float16"])
def test_color_keeps_dtype_and_range(channels, dtype):
    image = RNG.integers(0, 256, (8, 8, channels)).astype(dtype)
    if dtype.startswith("float"):
        image = image / np.array(200, dtype) - np.array(0.3, dtype)
    found = changed("color", image)
    assert found.dtype == image.dtype
    assert len(np.unique(found.reshape(60, -1), axis=0)) == 60
    if dtype != "uint8":
        assert found.min() >= image.min()
        assert found.max() <= image.max()
    if channels == 4:
        np.testing.assert_array_equal(found[..., 3], np.broadcast_to(image[..., 3], (60, 8, 8)))


@pytest.mark.parametrize(("dtype", "scale"), [("int64", 1), ("int32", 1), ("uint16", 16)])
def test_color_changes_other_whole_numbers_as_their_floats(dtype, scale):
    image = COLOUR.astype(dtype) * np.array(scale, dtype)
    found, floats = changed("color", image), changed("color", image.astype(np.float32))
    np.testing.assert_allclose(found, floats, atol=0.51)


def test_color_is_moderate_and_around_what_it_was():
    image = np.full((8, 8, 3), [90, 120, 150], np.uint8)
    found = changed("color", image).astype(float)
    # Brightness moves all of one colour, contrast and saturation move its parts from each other.
    assert np.abs(found.mean((1, 2, 3)) - 120).max() <= 0.125 * 255 + 2
    apart = found[:, 0, 0, 2] - found[:, 0, 0, 0]
    assert 60 * 0.75**2 - 1 <= apart.min() < 50
    assert 70 < apart.max() <= 60 * 1.25**2 + 1


def test_each_has_the_same_numbers_beside_others():
    both, order = changed("flip,color", COLOUR), changed(["color", " flip"], COLOUR)
    np.testing.assert_array_equal(both, order)
    flipped = (changed("flip", COLOUR) != COLOUR).any((1, 2, 3))
    alone = changed("color", COLOUR)
    # A mean is added up in another order when an image is mirrored.
    np.testing.assert_allclose(
        both.astype(int), np.where(flipped[:, None, None, None], alone[:, :, ::-1], alone), atol=1
    )


def test_records_are_changed_anew_in_each_epoch_and_alike_in_any_batches():
    images = RNG.integers(0, 256, (6, 8, 8, 3), np.uint8)
    x = {"image": images, "number": np.arange(6.0)}
    records = open_records((x, np.arange(6)), record_fn=tfdist.augment("flip,crop,color"))
    assert records.element_spec[0]["image"] == tf.TensorSpec([None, 8, 8, 3], tf.uint8)

    def epoch(number, size):
        batches = records.batches(0, 6, size, shuffle=True, seed=0, epoch=number)
        parts = [(x["number"].numpy(), x["image"].numpy()) for x, _ in batches]
        return (np.concatenate(part) for part in zip(*parts, strict=True))

    (order, first), (same_order, again), (_, other) = epoch(0, 6), epoch(0, 4), epoch(1, 6)
    np.testing.assert_array_equal(order, same_order)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_unknown_names_list_the_known_ones():
    assert parse_presets("color, flip") == ("flip", "color")
    for presets in ("flip,rotate", "flip,", [], ""):
        with pytest.raises(OptionError, match="one or more of flip, crop, color"):
            tfdist.augment(presets)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((2, 28, 28)), np.zeros(2), r"one image, .* shape \(28, 28\)"),
        (np.zeros((2, 4, 8, 8)), np.zeros(2), r"one image, .* shape \(4, 8, 8\)"),
        ({"a": np.zeros((2, 3)), "b": np.zeros(2)}, np.zeros(2), "no images among a, b"),
        (dict.fromkeys("ab", np.zeros((2, 4, 4, 1))), np.zeros(2), "2 images among a, b"),
        (np.zeros((2, 4, 4, 1)), np.zeros((2, 4, 4)), r"places .* shape \(4, 4\)"),
        (np.zeros((2, 4, 4, 1)), (np.zeros(2), np.zeros((2, 4, 4))), r"places .* shape \(4, 4\)"),
    ],
)
def test_what_is_no_image(x, y, message):
    with pytest.raises(DataError, match=message):
        open_records((x, y), record_fn=tfdist.augment("flip"))
