"""Sizes of images read from their first bytes, against what Pillow wrote."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tfdist.records.adopting.feature_statistics import Head, head_of, other_format


def written(kind, mode, size=(31, 17), **options):
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "mode", "channels", "bits"),
    [
        ("PNG", "L", 1, 8),
        ("PNG", "LA", 2, 8),
        ("PNG", "RGB", 3, 8),
        ("PNG", "P", 3, 1),
        ("PNG", "RGBA", 4, 8),
        ("PNG", "I;16", 1, 16),
        ("JPEG", "L", 1, 8),
        ("JPEG", "RGB", 3, 8),
        ("JPEG", "CMYK", 4, 8),
    ],
)
def test_size_and_channels(kind, mode, channels, bits):
    data = written(kind, mode)
    expected = Head(kind.lower(), 17, 31, channels, bits)
    assert head_of(data) == expected
    assert head_of(b"xx" + data + b"yy", 2, 2 + len(data)) == expected


def test_a_jpeg_with_long_segments_before_its_frame_and_a_progressive_one():
    exif = Image.Exif()
    exif[0x010E] = "x" * 40_000
    assert head_of(written("JPEG", "RGB", exif=exif))[1:3] == (17, 31)
    assert head_of(written("JPEG", "RGB", progressive=True))[1:3] == (17, 31)


def test_what_is_no_image_or_ends_too_early_has_no_head():
    for data in (b"", b"text", written("JPEG", "RGB")[:20], written("PNG", "L")[:20]):
        assert head_of(data) is None
    assert other_format(written("GIF", "L")) == "GIF"
    assert other_format(written("WEBP", "RGB")) == "WebP"
    assert other_format(b"text") is None
