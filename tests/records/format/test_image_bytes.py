"""Images are decoded when they are written, and when shards are checked."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError, EngineMissingError
from tfdist.records import check, read, write
from tfdist.records.format.image_bytes import orientation_of, undecodable


def encoded(kind, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 12, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture(params=["JPEG", "PNG"])
def photos(request, tmp_path):
    """Six photos; the last part of one is missing, though its header is right."""
    for number in range(6):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.{request.param.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = encoded(request.param, number)
        path.write_bytes(data[:-60] if number == 3 else data)
    return tmp_path / "photos"


def test_a_cut_image_is_not_written(photos, tmp_path):
    with pytest.raises(DataError, match=r"photos/b/3\.(jpeg|png): .* decode=False"):
        write(photos, tmp_path / "data", split="train=1", num_shards=1)
    assert not (tmp_path / "data").exists()


def test_a_check_names_the_record_of_a_cut_image(photos, tmp_path):
    write(photos, tmp_path / "data", split="train=1", num_shards=1, decode=False)
    assert check(tmp_path / "data") == []
    (fault,) = check(tmp_path / "data", decode=True)
    assert fault.record is not None
    assert "the image 'image' cannot be decoded" in fault.reason


def test_without_pillow_a_training_still_tells_of_a_cut_image(photos, tmp_path, monkeypatch):
    write(photos, tmp_path / "data", split="train=1", num_shards=1, decode=False)
    monkeypatch.delitem(sys.modules, "tfdist.records.format.image_bytes")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(EngineMissingError, match=r"Pillow must be .* 'tfdist\[images\]'"):
        check(tmp_path / "data", decode=True)
    with pytest.raises(DataError, match=r"record must fit the schema, but found .*\[images\]"):
        list(read(tmp_path / "data" / "train", batch_size=6))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_whole_images_of_the_right_size(kind):
    data = encoded(kind)
    assert undecodable(data) is None
    assert undecodable(data, (16, 12, 3)) is None
    assert undecodable(data, (12, 16, 3)) == "12x16 pixels where there are 16x12"
    assert undecodable(data[: len(data) - 30])
    assert undecodable(b"")


def test_a_flipped_bit_in_a_png():
    data = bytearray(encoded("PNG"))
    data[len(data) // 2] ^= 1
    assert undecodable(bytes(data))


def _chunk(kind, content):
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


@pytest.mark.parametrize("black", [0, 3, 16])
def test_a_png_whose_last_rows_are_missing(black):
    """Its checksums are right; Pillow makes black ones of them, and TensorFlow an error."""
    pixels = np.random.default_rng(0).integers(1, 256, (16, 12, 3), np.uint8)
    pixels[16 - black :] = 0
    rows = np.pad(pixels.reshape(16, 36), ((0, 0), (1, 0))).tobytes()
    head = b"\x89PNG\r\n\x1a\n"
    head += _chunk(b"IHDR", struct.pack(">IIBBBBB", 12, 16, 8, 2, 0, 0, 0))
    end = _chunk(b"IEND", b"")

    def png(rows):
        whole = zlib.compress(rows)
        return head + _chunk(b"IDAT", whole[:30]) + _chunk(b"IDAT", whole[30:]) + end

    assert undecodable(png(rows)) is None
    assert undecodable(png(rows[:74])) == "its last rows are missing"
    assert undecodable(png(rows[:-1]))


def test_what_is_behind_the_pixels_of_a_png_turns_it():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = exif.tobytes().removeprefix(b"Exif\0\0")
    whole = encoded("PNG")
    with Image.open(io.BytesIO(whole[:-12] + _chunk(b"eXIf", content) + whole[-12:])) as image:
        assert orientation_of(image) == 6
        image.load()
        assert orientation_of(image) == 6
    with Image.open(io.BytesIO(whole)) as image:
        assert orientation_of(image) == 1


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_jpeg_whose_end_is_missing(options):
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", **options)
    whole = file.getvalue()
    behind = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8).tobytes()
    for data in (whole, whole + b"\0" * 9, whole + behind, whole + whole):
        assert undecodable(data) is None
    for more in (b"", b"\0" * 999, b"<x:xmpmeta>"):  # Pillow reads it; TensorFlow does not.
        assert undecodable(whole[:-2] + more)
