"""The bytes of records. What TensorFlow makes of them is in test_round_trip.py."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from crc32c import crc32c

from tfdist.records.format.encoding import (
    frame_record,
    make_framer,
    make_layout,
    mask,
    padded_varints,
    varint,
    varint_width,
)
from tfdist.records.format.schema import Feature, Schema

IMAGE = Feature(name="image", dtype="uint8", shape=(2, 2, 1), encoding="raw", role="input")
LABEL = Feature(name="label", dtype="int64", shape=(), encoding="int64", role="label")


def test_mask_is_the_one_of_tensorflow():
    # TensorFlow's record_reader test: a record of length 0 starts with these 12 bytes.
    assert frame_record(b"")[0] == bytes.fromhex("0000000000000000") + struct.pack(
        "<I", mask(crc32c(bytes(8)))
    )
    assert mask(0) == 0xA282EAD8


@pytest.mark.parametrize(
    ("number", "expected"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")]
)
def test_varint(number, expected):
    assert varint(number) == expected


@pytest.mark.parametrize(
    ("values", "width"),
    [([0], 1), ([127], 1), ([128], 2), ([1 << 14], 3), ([(1 << 63) - 1], 9), ([5, -1], 10)],
)
def test_width_of_the_longest_varint(values, width):
    assert varint_width(np.array(values, np.int64)) == width


def test_padded_varints_hold_the_numbers():
    values = np.array([[0, 1], [300, 16383]], np.int64)
    digits = padded_varints(values, 3).reshape(2, 2, 3).astype(np.int64)
    assert (digits[..., :2] >= 128).all()
    numbers = sum((digits[..., place] & 127) << (7 * place) for place in range(3))
    np.testing.assert_array_equal(numbers, values)


def test_fixed_records_have_the_layout_that_the_manifest_says():
    schema = Schema((IMAGE, LABEL))
    layout = make_layout(schema, {"label": 1})
    block = {
        "image": np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1),
        "label": np.array([3, 127]),
    }
    frames = np.frombuffer(make_framer(schema, {"label": 1}).frame(block), np.uint8).reshape(2, -1)
    assert frames.shape[1] == layout.record_bytes + 16
    records = frames[:, 12:-4]
    image, label = layout.slots["image"], layout.slots["label"]
    np.testing.assert_array_equal(
        records[:, image.offset : image.offset + image.bytes], block["image"].reshape(2, 4)
    )
    np.testing.assert_array_equal(records[:, label.offset], [3, 127])
    assert label.bytes == 1
    for frame in frames:
        assert b"".join(frame_record(frame[12:-4].tobytes())) == frame.tobytes()


def test_a_smaller_last_block_reuses_the_buffer():
    schema = Schema((IMAGE, LABEL))
    framer = make_framer(schema, {"label": 1})
    big = {"image": np.ones((5, 2, 2, 1), np.uint8), "label": np.arange(5)}
    small = {"image": np.zeros((1, 2, 2, 1), np.uint8), "label": np.array([9])}
    framer.frame(big)
    alone = make_framer(schema, {"label": 1}).frame(small)
    assert bytes(framer.frame(small)) == bytes(alone)


def test_images_have_no_layout():
    encoded = Feature(name="image", dtype="uint8", shape=(8, 8, 3), encoding="png", role="input")
    assert make_layout(Schema((encoded, LABEL)), {"label": 1}) is None
