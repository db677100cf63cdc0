"""Images of any size, read in one size: against resizing by other hands, and what goes wrong."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tfdist.errors import CorruptShardError, DataError
from tfdist.records import check, explain_read_error, open_records, read, write
from tfdist.records.clients.shard_store import ShardStore
from tfdist.records.format.exif import orientation_of_jpeg
from tfdist.records.format.manifest import load_manifest
from tfdist.records.format.readings import with_readings
from tfdist.records.format.schema import Feature, Reading
from tfdist.records.reading.images import check_one_size, decode_image, decode_images
from tfdist.records.reading.images import orientation_of_jpeg as upright_in_graph
from tfdist.records.reading.shard_source import ShardSource

RNG = np.random.default_rng(0)
FITS = pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])


def smooth(height, width, mode="RGB", cells=(4, 5)):
    """Pixels as a photo has them: what is near is alike."""
    coarse = RNG.integers(0, 256, (*cells, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image.convert(mode))


def file_of(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def feature(
    size=None,
    fit="stretch",
    *,
    shape=(None, None, 3),
    encoding="png",
    dtype="uint8",
    role="input",
    channels=None,
):
    reading = Reading(size=size, fit=fit, channels=channels)
    return Feature(
        name="image", dtype=dtype, shape=shape, encoding=encoding, role=role, reading=reading
    )


def decoded(described, files):
    run = tf.function(lambda files: decode_images(described, files))
    return run(tf.constant(files)).numpy()


def by_pillow(pixels, size, fit):
    """The same with Pillow: bilinear, over all pixels that one covers."""
    height, width = size
    bilinear = Image.Resampling.BILINEAR
    image = Image.fromarray(pixels)
    if fit == "stretch":
        return np.asarray(image.resize((width, height), bilinear))
    scales = (height / image.height, width / image.width)
    if fit == "crop":
        kept = [round(n / max(scales)) for n in size]
        top, left = (image.height - kept[0]) // 2, (image.width - kept[1]) // 2
        part = image.crop((left, top, left + kept[1], top + kept[0]))
        return np.asarray(part.resize((width, height), bilinear))
    inner = [round(n * min(scales)) for n in (image.height, image.width)]
    padded = np.zeros((height, width, *pixels.shape[2:]), np.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    small = np.asarray(image.resize((inner[1], inner[0]), bilinear))
    padded[top : top + inner[0], left : left + inner[1]] = small
    return padded


@FITS
def test_pixels_are_those_of_another_library(fit):
    photos = [smooth(*size) for size in ((48, 60), (24, 80), (90, 33), (7, 9), (30, 30))]
    found = decoded(feature((16, 20), fit), [file_of(photo) for photo in photos])
    assert (found.shape, found.dtype) == ((5, 16, 20, 3), np.uint8)
    for pixels, photo in zip(found, photos, strict=True):
        known = by_pillow(photo, (16, 20), fit)
        # Pillow rounds between its two passes.
        assert np.abs(pixels.astype(int) - known).max() <= 1


@FITS
def test_a_jpeg_is_made_smaller_while_it_is_decoded(fit):
    """Sizes that libjpeg divides by 1, 2, 4 and 8."""
    sizes = (23, 30), (67, 90), (131, 161), (275, 350), (131, 400)
    photos = [smooth(*size, cells=(2, 3)) for size in sizes]
    files = [file_of(photo, "JPEG", quality=95) for photo in photos]
    found = decoded(feature((16, 20), fit, encoding="jpeg"), files)
    as_image = decoded(feature((16, 20), fit, encoding="image"), [*files, file_of(photos[0])])
    np.testing.assert_array_equal(as_image[:-1], found)
    for pixels, photo, file in zip(found, photos, files, strict=True):
        exact = by_pillow(np.asarray(Image.open(io.BytesIO(file))), (16, 20), fit)
        assert np.abs(pixels.astype(int) - exact).mean() < 3, photo.shape


def test_channels():
    color, gray = smooth(12, 16), smooth(12, 16, "L")
    alpha = np.dstack([color, RNG.integers(0, 256, (12, 16), np.uint8)])
    files = [file_of(pixels) for pixels in (color, gray, alpha)]
    jpeg = file_of(color, "JPEG")
    as_color = decoded(feature(channels=3, shape=(12, 16, 4)), files)
    np.testing.assert_array_equal(as_color, [color, np.dstack([gray] * 3), alpha[..., :3]])
    whole = decoded(feature(shape=(12, 16, 4), encoding="image"), [*files, jpeg])
    np.testing.assert_array_equal(whole[2], alpha)
    assert (whole[[0, 1, 3], ..., 3] == 255).all()
    np.testing.assert_array_equal(whole[3, ..., :3], tf.io.decode_jpeg(jpeg, 3))
    as_gray = decoded(feature(channels=1, shape=(12, 16, 4), encoding="image"), [*files, jpeg])
    known = np.asarray(Image.fromarray(color).convert("L")).astype(int)
    assert np.abs(as_gray[0, ..., 0] - known).max() <= 1
    assert np.abs(as_gray[3, ..., 0] - known).mean() < 3
    np.testing.assert_array_equal(as_gray[1, ..., 0], gray)


def test_sixteen_bits_stay():
    pixels = RNG.integers(0, 1 << 16, (6, 8), np.uint16)
    described = feature((3, 4), shape=(6, 8, 1), dtype="uint16")
    found = decoded(described, [file_of(pixels)])[0, ..., 0]
    assert found.dtype == np.uint16
    white = np.full((6, 8), 65535, np.uint16)
    assert (decoded(described, [file_of(white)]) == 65535).all()
    assert found.max() > 256


@FITS
def test_masks_are_never_mixed_and_lie_on_their_images(fit):
    """An image that is bright where its mask has a 9, resized alike."""
    mask = np.zeros((40, 52), np.uint8)
    mask[12:31, 17:45] = 9
    image = np.dstack([(mask > 0) * np.uint8(250)] * 3)
    size = (16, 16)
    of_mask = feature(size, fit, shape=(None, None, 1), role="label")
    numbers = decoded(of_mask, [file_of(mask)])[0, ..., 0]
    assert set(np.unique(numbers)) == {0, 9}
    for encoding, kind in (("png", "PNG"), ("jpeg", "JPEG")):
        found = decoded(feature(size, fit, encoding=encoding), [file_of(image, kind)])
        differs = (found[0, ..., 0] > 125) != (numbers > 0)
        assert differs.mean() < 0.04


def test_one_image_alone_may_have_any_size():
    """For what makes images one size by itself."""
    run = tf.function(lambda file: decode_image(feature(encoding="image"), file))
    for photo in (smooth(5, 9), smooth(8, 3)):
        np.testing.assert_array_equal(run(file_of(photo)), photo)


@FITS
def test_a_line_of_pixels(fit):
    """Neither sizes of 0 nor an image of any width come of it."""
    found = decoded(feature((8, 8), fit), [file_of(smooth(1, 3000)), file_of(smooth(3000, 1))])
    assert found.shape == (2, 8, 8, 3)
    assert found.max() > 0


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve JPEG and PNG photos of two classes and eleven sizes."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        path = folder / "ab"[number % 2] / f"{number:02d}.{('jpg', 'png')[number % 3 == 0]}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(smooth(40 + 7 * (number // 2 * 2), 30 + 11 * number)).save(path)
    return folder


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write(photos, folder / "sized", split="train=1", num_shards=3, resize="16x16", fit="crop")
    write(photos, folder / "any", split="train=1", num_shards=1)
    return folder


def test_every_batch_size_gives_the_same_pixels(shards):
    whole, labels = next(iter(read(shards / "sized", batch_size=12, cache=False)))
    assert whole.shape == (12, 16, 16, 3)
    for size, cache in ((1, False), (5, False), (5, True)):
        batches = list(read(shards / "sized", batch_size=size, cache=cache))
        np.testing.assert_array_equal(tf.concat([x for x, _ in batches], 0), whole)
        np.testing.assert_array_equal(tf.concat([y for _, y in batches], 0), labels)
    x, _ = open_records(shards / "sized").element_spec
    assert (x.shape.as_list(), x.dtype) == ([None, 16, 16, 3], tf.uint8)


def test_a_reading_can_be_changed_without_writing(shards, tmp_path):
    folder = shards / "any"
    with pytest.raises(DataError, match=r"in one size.*'image', whose sizes differ.*adopt DIR"):
        open_records(folder)
    manifest = load_manifest(folder)
    with pytest.raises(DataError, match="one size"):
        check_one_size(manifest.schema)
    assert ShardSource(folder, "train", manifest, any_size=True).num_records == 12
    path = folder / "manifest.json"
    kept = path.read_text()
    value = json.loads(kept)
    changed = with_readings(manifest.schema, resize="16x16", fit="crop").to_json()
    value["schema"] = changed
    del value["checksum"]
    try:
        path.write_text(json.dumps(value))
        ours = np.concatenate([x for x, _ in read(folder, batch_size=4)])
        theirs = np.concatenate([x for x, _ in read(shards / "sized", batch_size=4)])
    finally:
        path.write_text(kept)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))


def test_clients_need_one_size_too(shards, photos, tmp_path):
    for name, options in (("any", {}), ("sized", {"resize": "8x8"})):
        manifest = write(photos, tmp_path / name, split="train=1", clients=2, **options)
        store = ShardStore.of_split(tmp_path / name, "train", manifest)
        if name == "any":
            with pytest.raises(DataError, match="in one size"):
                store.spec  # noqa: B018
        else:
            x, _ = store.read(store.ids[0])
            assert x.shape[1:] == (8, 8, 3)


def test_boxes_are_padded(photos, tmp_path):
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.*"))
    rows = [
        {"file": name, "boxes": [[0.5, 0, 1, number / 12]] * (number % 3)}
        for number, name in enumerate(names)
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write(
        photos,
        tmp_path / "out",
        split="train=1",
        num_shards=1,
        labels=tmp_path / "l.jsonl",
        resize="8x8",
    )
    (x, boxes) = next(iter(read(tmp_path / "out", batch_size=12)))
    assert (x.shape, boxes.shape) == ((12, 8, 8, 3), (12, 2, 4))
    known = np.zeros((12, 2, 4), np.float32)
    for number, row in enumerate(rows):
        known[number, : len(row["boxes"])] = np.reshape(row["boxes"], (-1, 4))
    assert sorted(map(bytes, boxes.numpy())) == sorted(map(bytes, known))


def test_clients_may_have_other_sizes(tmp_path):
    """A folder for each client, whose images have one size each."""
    for name, size in (("a", (8, 6)), ("b", (5, 9))):
        path = tmp_path / "photos" / name / "c" / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(smooth(*size)).save(path)
        write(
            tmp_path / "photos" / name,
            tmp_path / "fed" / name,
            split="train=1",
            num_shards=1,
            resize="4x4",
        )
    store = ShardStore.of_folders(tmp_path / "fed", None)
    assert [store.read(name)[0].shape.as_list() for name in "ab"] == [[1, 4, 4, 3]] * 2


@pytest.mark.parametrize("kind", ["jpg", "png", "*g"])
def test_a_damaged_image_is_named(photos, tmp_path, kind):
    """Its header is right, so that it is met while it is decoded."""
    for path in photos.rglob(f"*.{kind}"):
        copy = tmp_path / "photos" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    copy.write_bytes(copy.read_bytes()[:-300])
    out = tmp_path / "out"
    write(tmp_path / "photos", out, split="train=1", num_shards=1, resize="8x8", decode=False)
    (fault,) = check(out, decode=True)
    records = open_records(out, cache=True)
    with pytest.raises(CorruptShardError) as raised:
        records.batches(0, records.num_records, 2, shuffle=False, seed=0, epoch=0)
    assert str(fault) in str(raised.value)
    assert "the image 'image' cannot be decoded" in str(fault)
    streamed = open_records(out, cache=False)
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        list(streamed.batches(0, streamed.num_records, 2, shuffle=True, seed=0, epoch=0))
    assert str(explain_read_error(failed.value, streamed)) == str(raised.value)


def with_orientation(pixels, orientation, kind="JPEG"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(pixels, kind, exif=exif, quality=95)


class TestUpright:
    """Photos that a camera took on its side, against what Pillow makes of them."""

    @pytest.mark.parametrize("encoding", ["jpeg", "image"])
    # The last one is made smaller while it is decoded: other pixels, and no other place.
    @pytest.mark.parametrize(("size", "apart"), [(None, 0), ((12, 9), 0), ((4, 3), 60)])
    def test_pixels_are_those_of_the_upright_photo(self, encoding, size, apart):
        described = feature(size, encoding=encoding, fit="crop")
        upright = replace(described, reading=replace(described.reading, upright=True))
        run = tf.function(lambda file: decode_image(upright, file))
        pixels = smooth(24, 40)
        stored = tf.io.decode_jpeg(with_orientation(pixels, 1)).numpy()
        for orientation in range(1, 9):
            with Image.open(io.BytesIO(with_orientation(stored, orientation, "PNG"))) as image:
                wanted = file_of(np.asarray(ImageOps.exif_transpose(image)))
            expected = decode_image(feature(size, fit="crop"), tf.constant(wanted)).numpy()
            found = run(tf.constant(with_orientation(pixels, orientation))).numpy()
            assert found.shape == expected.shape
            assert np.abs(found.astype(int) - expected).max() <= apart

    @pytest.mark.parametrize("cut", [0, 2, 12, 24, 30, 40])
    def test_exif_that_ends_within_names_no_orientation(self, cut):
        file = with_orientation(smooth(8, 8), 6)[:cut]
        assert orientation_of_jpeg(file) == int(upright_in_graph(tf.constant(file))) == 1

    def test_both_readers_find_the_same(self):
        """Behind other segments, in either order of bytes, of either kind, among other entries."""
        others = b"\xff\xe0\x00\x04ab" + b"\xff\xff\xfe\x00\x03c"
        orders = (
            (">", "HHIHH", 3, 5),
            ("<", "HHIHH", 3, 7),
            (">", "HHII", 4, 5),
            ("<", "HHII", 4, 8),
        )
        for order, form, kind, number in orders:
            tiff = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(f"{order}IH", 8, 2)
            tiff += struct.pack(f"{order}HHII", 0x010F, 2, 4, 9)
            tiff += struct.pack(order + form, 0x0112, kind, 1, number, *[0] * (kind == 3))
            exif = b"Exif\0\0" + tiff
            file = b"\xff\xd8" + others + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif
            assert orientation_of_jpeg(b"xy" + file, 2) == number
            assert int(upright_in_graph(tf.constant(file))) == number

    def test_a_folder_is_trained_on_upright_and_checked(self, tmp_path):
        """Of one size when they are turned, and so without a resize."""
        lower = np.zeros((16, 8, 3), np.uint8)
        lower[8:] = 255
        folder = tmp_path / "photos" / "c"
        folder.mkdir(parents=True)
        for number in range(4):
            # What is stored is turned back, by the orientation that says so.
            stored = np.rot90(lower) if number % 2 else lower
            file = with_orientation(np.ascontiguousarray(stored), 6 if number % 2 else 1)
            (folder / f"{number}.jpg").write_bytes(file)
        write(tmp_path / "photos", tmp_path / "out", split="train=1", num_shards=1)
        x, _ = next(iter(read(tmp_path / "out", batch_size=4)))
        assert np.abs(x.numpy().astype(int) - lower).max() < 12
        assert check(tmp_path / "out", decode=True) == []
        assert load_manifest(tmp_path / "out").schema.features[0].reading.upright
