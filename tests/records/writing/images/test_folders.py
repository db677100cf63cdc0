"""Folders of images as users have them: what is written, what is said, and what is refused."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from tfdist.errors import DataError, OptionError
from tfdist.records import load_manifest, write
from tfdist.records.writing.images import files
from tfdist.records.writing.images.options import ImageOptions, image_options
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

RNG = np.random.default_rng(0)


def save(path, size=(4, 3), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 0).save(path, **options)
    return path


def save_pixels(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def gray_png(width, *, bits, row):
    """Returns a PNG of one row, of as many bits a pixel."""

    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, 1, bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(row)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def noise(height, width, channels=3, most=256):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return RNG.integers(0, most, shape, np.uint8)


def opened(folder, asked=None, **options):
    return read_raw(folder, asked, images=ImageOptions(**options))


def values(columns, name="image"):
    return columns.block(np.arange(columns.num_records))[name]


def note(columns, part):
    """The one note that holds a text."""
    (found,) = [text for text in columns.notes if part in text]
    return found


class TestFiles:
    @pytest.mark.parametrize("mode", ["L", "RGBA", "I;16"])
    def test_a_tiff_that_is_turned(self, tmp_path, mode):
        pixels = noise(5, 8, 4 if mode == "RGBA" else 1)
        pixels = pixels.astype(np.uint16) if mode == "I;16" else pixels
        save_pixels(tmp_path / "a/x.tif", pixels, tiffinfo={274: 6})
        written = Image.open(io.BytesIO(values(read_raw(tmp_path))[0]))
        np.testing.assert_array_equal(np.asarray(written), np.rot90(pixels, -1))

    def test_bytes_are_kept(self, tmp_path):
        for name in ("dog/b.png", "cat/a.png"):
            save(tmp_path / name)
        columns = read_raw(tmp_path)
        image, label = columns.schema.features
        assert (image.shape, image.encoding) == ((3, 4, 3), "png")
        assert label.classes == ("cat", "dog")
        assert values(columns)[0] == (tmp_path / "cat/a.png").read_bytes()
        np.testing.assert_array_equal(values(columns, "label"), [0, 1])
        assert columns.notes == ()

    @pytest.mark.parametrize(
        ("names", "encoding"),
        [
            (("a.jpg", "b.jpg"), "jpeg"),
            (("a.jpg", "b.png"), "image"),
            (("a.bmp", "b.png"), "png"),
        ],
    )
    def test_encoding(self, tmp_path, names, encoding):
        for name in names:
            save(tmp_path / "c" / name)
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].encoding == encoding
        start = b"\xff\xd8" if names[0].endswith("jpg") else b"\x89PNG"
        assert values(columns)[0].startswith(start)

    def test_a_photo_of_a_telephone_is_kept(self, tmp_path):
        path = tmp_path / "c/a.jpg"
        path.parent.mkdir()
        photo, preview = (Image.fromarray(noise(8, 8)) for _ in range(2))
        photo.save(path, "MPO", save_all=True, append_images=[preview])
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].encoding == "jpeg"
        assert values(columns) == [path.read_bytes()]

    def test_unequal_sizes_are_written(self, tmp_path):
        kept = [save(tmp_path / f"c/{n}.png", size=(4 + n, 9 - n)).read_bytes() for n in range(3)]
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].shape == (None, None, 3)
        assert values(columns) == kept
        text = note(columns, "resize='HxW'")
        assert "3 sizes, heights 7 to 9 and widths 4 to 6" in text
        assert opened(tmp_path, is_resized=True).notes == ()

    @pytest.mark.parametrize(
        ("modes", "channels", "said"),
        [
            (("L", "L"), 1, None),
            (("L", "RGB"), 3, "1 of 2 images are gray"),
            (("RGB", "RGBA"), 4, "1 of 2 images have an alpha channel"),
            (("L", "RGBA"), 4, "1 of 2 images have an alpha channel"),
            (("P", "RGB"), 3, "1 of 2 images are written as PNG: PNG P"),
        ],
    )
    def test_as_many_channels_as_any_has(self, tmp_path, modes, channels, said):
        for number, mode in enumerate(modes):
            save(tmp_path / f"c/{number}.png", mode=mode)
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].shape == (3, 4, channels)
        assert [said] == [next((said for n in columns.notes if said in n), None)] or not said
        assert bool(columns.notes) == (said is not None)

    def test_nothing_is_said_of_channels_that_are_asked_for(self, tmp_path):
        for number, mode in enumerate(("L", "RGB", "RGBA")):
            save(tmp_path / f"c/{number}.png", mode=mode)
        assert opened(tmp_path, color="gray").notes == ()

    def test_sixteen_bits_do_not_mix_with_eight(self, tmp_path):
        save(tmp_path / "c/a.png", mode="I;16")
        assert read_raw(tmp_path).schema.features[0].dtype == "uint16"
        save(tmp_path / "c/b.png", mode="L")
        with pytest.raises(DataError, match=r"a\.png 4x3 with 1 16-bit channel, .*b\.png 4x3"):
            read_raw(tmp_path)

    def test_colours_of_sixteen_bits_are_told(self, tmp_path):
        """As Pillow and tf.io.decode_png read them: their upper 8 bits."""
        kinds = {"IHDR": struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0), "IEND": b""}
        kinds["IDAT"] = zlib.compress(b"\0" + struct.pack(">HHH", 300, 600, 65535))
        data = b"\x89PNG\r\n\x1a\n"
        for kind in ("IHDR", "IDAT", "IEND"):
            chunk = kind.encode() + kinds[kind]
            sizes = struct.pack(">I", len(kinds[kind])), struct.pack(">I", zlib.crc32(chunk))
            data += sizes[0] + chunk + sizes[1]
        (tmp_path / "c").mkdir()
        (tmp_path / "c/a.png").write_bytes(data)
        save(tmp_path / "c/b.png", size=(1, 1))
        (tmp_path / "c/c.ppm").write_bytes(b"P6 1 1 65535\n" + struct.pack(">HHH", 300, 600, 65535))
        (tmp_path / "c/d.ppm").write_bytes(b"P6 1 1 255\n123")
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].dtype == "uint8"
        assert note(columns, "16 bits").startswith("2 of 4 images have colours of 16 bits, of")

    def test_what_a_camera_turned_is_told(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6
        save(tmp_path / "c/a.jpg", exif=exif)
        columns = read_raw(tmp_path)
        assert "1 of 1 images say in EXIF" in note(columns, "EXIF")
        image = columns.schema.features[0]
        assert (image.shape, image.reading.upright) == ((4, 3, 3), True)

    @pytest.mark.parametrize("kind", ["png", "webp"])
    def test_what_is_written_without_loss_is_written_upright(self, tmp_path, kind):
        pixels, exif = noise(4, 6), Image.Exif()
        exif[0x0112] = 8
        save_pixels(tmp_path / f"c/a.{kind}", pixels, exif=exif, lossless=True)
        columns = read_raw(tmp_path)
        assert columns.schema.features[0].shape == (6, 4, 3)
        assert not columns.schema.features[0].reading.upright
        with Image.open(io.BytesIO(values(columns)[0])) as image:
            np.testing.assert_array_equal(np.asarray(image), np.rot90(pixels))

    def test_a_photo_that_is_written_anew_is_written_upright(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6
        pixels = np.zeros((16, 32, 3), np.uint8)
        pixels[:, 16:] = 255  # The right half comes to be the lower one.
        save_pixels(tmp_path / "c/a.jpg", pixels, exif=exif, quality=95)
        columns = opened(tmp_path, written_size=(8, 4), is_resized=True)
        assert not columns.schema.features[0].reading.upright
        with Image.open(io.BytesIO(values(columns)[0])) as image:
            means = np.asarray(image).reshape(8, -1).mean(axis=1)
        assert means[:3].max() < 20 < 235 < means[5:].min()


class TestBadFiles:
    @pytest.fixture
    def photos(self, tmp_path):
        """Thirty photos: 24 are empty files, and of one the end is missing."""
        for number in range(6):
            save_pixels(tmp_path / f"photos/a/{number}.jpg", noise(16, 16))
        data = (tmp_path / "photos/a/3.jpg").read_bytes()
        (tmp_path / "photos/a/3.jpg").write_bytes(data[:-60])
        for number in range(24):
            (tmp_path / f"photos/a/bad{number:02d}.jpg").write_bytes(b"")
        return tmp_path / "photos"

    def test_all_are_named(self, photos):
        with pytest.raises(DataError) as raised:
            read_raw(photos)
        text = str(raised.value)
        assert f"25 that cannot in {photos}: a/3.jpg: image file is truncated" in text
        assert text.count(".jpg: ") == 20
        assert "and 5 more. Repair or remove them, or leave them out with skip_bad=True" in text

    def test_they_can_be_left_out(self, photos, tmp_path):
        columns = opened(photos, skip_bad=True)
        assert columns.num_records == 5
        assert note(columns, "left out").startswith(
            "25 of 30 images are left out as bad: a/3.jpg: "
        )
        told = []
        manifest = write(
            photos,
            tmp_path / "out",
            split="train=1",
            num_shards=1,
            skip_bad=True,
            opened=lambda columns: told.extend(columns.notes),
        )
        assert manifest.splits["train"].records == 5
        assert any("25 of 30" in text for text in told)
        assert manifest.left_out == {"unreadable image": 25}

    def test_without_decoding_only_headers_count(self, photos):
        assert opened(photos, skip_bad=True, decode=False).num_records == 6

    def test_a_png_without_its_end(self, tmp_path):
        """Which Pillow reads, and libpng not."""
        path = save(tmp_path / "c/a.png")
        path.write_bytes(path.read_bytes()[:-4] + b"1234")
        with pytest.raises(DataError, match=r"a\.png: its end is damaged, or cut off"):
            read_raw(tmp_path)

    def test_a_link_to_itself_is_named(self, tmp_path):
        save(tmp_path / "photos/a/1.png")
        (tmp_path / "photos/a/me.png").symlink_to("me.png")
        with pytest.raises(DataError, match=r"me\.png: Too many levels of symbolic links"):
            write(tmp_path / "photos", tmp_path / "out")

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("decode", [True, False])
    @pytest.mark.parametrize("name", ["device.png", "pipe.jpg", "pipe"])
    def test_what_never_ends_is_not_read(self, tmp_path, name, decode):
        save(tmp_path / "photos/a/1.png")
        path = tmp_path / "photos/a" / name
        path.symlink_to("/dev/zero") if "device" in name else os.mkfifo(path)
        if "." not in name:  # It says nothing of an image, and is no file to look into.
            assert opened(tmp_path / "photos", decode=decode).num_records == 1
            return
        with pytest.raises(DataError, match=rf"a/{name}: is no regular file"):
            opened(tmp_path / "photos", decode=decode)

    def test_none_is_left(self, tmp_path):
        save(tmp_path / "c/a.png").write_bytes(b"no image")
        with pytest.raises(DataError, match=r"1 that cannot: .*c/a\.png: is no image"):
            opened(tmp_path, skip_bad=True)


class TestStructure:
    def test_foreign_files_are_skipped_and_told(self, tmp_path):
        save(tmp_path / "cat/a.png")
        (tmp_path / "cat/strange").write_bytes((tmp_path / "cat/a.png").read_bytes())
        for name in ("README.txt", ".DS_Store", "cat/Thumbs.db", "cat/desktop.ini", ".git/x"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        (tmp_path / "empty").mkdir()
        columns = read_raw(tmp_path)
        assert columns.num_records == 2  # a PNG is one without a suffix too
        assert columns.schema.features[1].classes == ("cat",)
        text = note(columns, "as no images")
        told = "5 files are left out as no images: .DS_Store, .git, README.txt, cat/Thumbs.db"
        assert text.startswith(told)
        assert note(columns, "no classes") == "class folders without an image are no classes: empty"

    @pytest.mark.parametrize("names", [("train", "val"), ("Train", "valid"), ("train", "dev")])
    def test_ready_made_splits(self, tmp_path, names):
        for name in ("cat/a", "cat/b", "dog/c"):
            save(tmp_path / names[0] / f"{name}.png")
        for name in ("cat/a", "emu/d"):
            save(tmp_path / names[1] / f"{name}.png")
        save(tmp_path / "test/dog/e.png")
        columns = read_raw(tmp_path)
        assert columns.schema.features[1].classes == ("cat", "dog", "emu")
        np.testing.assert_array_equal(values(columns, "label"), [0, 0, 1, 0, 2, 1])
        assert {name: rows.tolist() for name, rows in columns.splits.items()} == {
            "train": [0, 1, 2],
            "validation": [3, 4],
            "test": [5],
        }
        assert "split 'train' has no image of emu" in columns.notes
        manifest = write(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", num_shards=1)
        assert {n: s.records for n, s in manifest.splits.items()} == {
            "train": 3,
            "validation": 2,
            "test": 1,
        }
        assert manifest.splits["validation"].class_counts == {0: 1, 2: 1}

    def test_a_class_may_be_called_train(self, tmp_path):
        save(tmp_path / "train/a.png")
        save(tmp_path / "plane/b.png")
        columns = read_raw(tmp_path)
        assert columns.schema.features[1].classes == ("plane", "train")
        assert columns.splits is None

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ((), "nothing in"),
            (("c/",), "every class folder must have an image, but found none in .* beside c"),
            (("c/readme.md",), "none in .* beside c, c/readme.md"),
            (("a.txt",), r"texts must lie in class folders.*found a\.txt in .*\.jsonl file"),
            (("a.png",), r"the file .*/a\.png, in no class folder.* labels='FILE'"),
            (("a.png", "c/b.png"), r"the file .*/a\.png, in no class folder"),
            (("c/deep/a.png",), "the folder .*/c/deep, with images"),
            (("train/a.png", "test/b.png"), r"the file .*/train/a\.png, in no class folder"),
            (("train/c/a.png", "val/c/a.png", "valid/c/a.png"), "each split must have one folder"),
            (("train/c/a.png", "val/c/a.png", "dog/a.png"), "must hold no other images"),
        ],
    )
    def test_what_is_refused(self, tmp_path, names, message):
        for name in names:
            if name.endswith(".png"):
                save(tmp_path / name)
            elif name.endswith("/"):
                (tmp_path / name).mkdir()
            else:
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("x")
        with pytest.raises(DataError, match=message):
            read_raw(tmp_path)


class TestLabels:
    @pytest.fixture
    def photos(self, tmp_path):
        for name in "abcd":
            save(tmp_path / f"photos/{name}.png")
        return tmp_path / "photos"

    def test_several_columns_of_a_csv(self, photos):
        (photos / "labels.csv").write_text(
            "Filename;breed;age;weight;note\n"
            "b.png;pug;3;1.5;x\n./a.png;chow;1;2;y\nd;pug;2;3;z\nc.png;pug;0;4;z\n"
        )
        columns = opened(photos, Asked(drop="note"), labels="labels.csv")
        labels = columns.schema.of_role("label")
        assert [(f.name, f.dtype, f.classes) for f in labels] == [
            ("breed", "int64", ("chow", "pug")),
            ("age", "int64", None),
            ("weight", "float32", None),
        ]
        np.testing.assert_array_equal(values(columns, "breed"), [0, 1, 1, 1])
        np.testing.assert_array_equal(values(columns, "age"), [1, 3, 0, 2])
        np.testing.assert_array_equal(values(columns, "weight"), [2, 1.5, 4, 3])
        assert columns.roles == (
            ("Filename", "name of the file"),
            ("breed", "label"),
            ("age", "label"),
            ("weight", "label"),
            ("note", "dropped"),
        )

    def test_text_is_as_it_is_written(self, photos):
        """Between quotes a line may end; and what Python alone reads as a number is none."""
        rows = "".join(f'{name}.png,"two\nlines {name}",1_{n}\n' for n, name in enumerate("abcd"))
        (photos / "labels.csv").write_text("file,said,code\n" + rows)
        columns = opened(photos, labels="labels.csv")
        labels = {f.name: f.classes for f in columns.schema.of_role("label")}
        assert labels["said"] == tuple(f"two\nlines {name}" for name in "abcd")
        assert labels["code"] == ("1_0", "1_1", "1_2", "1_3")

    def test_one_column_is_the_label_and_others_divide(self, photos, tmp_path):
        path = tmp_path / "beside.csv"
        path.write_text("id,split,kind,owner\na,train,x,1\nb,train,y,2\nc,val,x,1\nd,train,y,3\n")
        columns = opened(photos, Asked(label="kind", client="owner"), labels=path)
        assert columns.schema.class_label.classes == ("x", "y")
        assert columns.splits["train"].tolist() == [0, 1, 3]
        assert columns.splits["validation"].tolist() == [2]
        assert columns.owners.tolist() == ["1", "2", "1", "3"]

    def test_several_classes_and_boxes(self, photos):
        rows = [
            {"file": "a.png", "tags": ["red", "big"], "boxes": [[0, 0, 1, 2], [1, 1, 2, 3.5]]},
            {"file": "b.png", "tags": [], "boxes": []},
            {"file": "c.png", "tags": ["big"], "boxes": [[4, 4, 5, 5]]},
            {"file": "d.png", "tags": ["blue"], "boxes": [[0, 0, 9, 9]] * 3},
        ]
        (photos / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
        columns = opened(photos, labels="l.jsonl")
        tags, boxes = columns.schema.of_role("label")
        assert (tags.shape, tags.dtype, tags.classes) == ((3,), "float32", ("big", "blue", "red"))
        np.testing.assert_array_equal(
            values(columns, "tags"), [[1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
        )
        assert (boxes.shape, boxes.dtype, boxes.longest) == ((None, 4), "float32", 3)
        found = values(columns, "boxes")
        np.testing.assert_array_equal(found[0], rows[0]["boxes"])
        assert [len(value) for value in found] == [2, 0, 1, 3]
        with pytest.raises(DataError, match=r"relative to height and width.*a box with 9, which"):
            opened(photos, labels="l.jsonl", is_resized=True)
        with pytest.raises(DataError, match=r"must be stretched.*found fit crop beside 'boxes'"):
            opened(photos, labels="l.jsonl", is_resized=True, fit="crop")

    def test_a_class_for_each_box(self, photos):
        kinds = [["cat", "dog"], [], ["dog"], ["cat"]]
        rows = [
            {"file": f"{name}.png", "boxes": [[0, 0, 1, 1]] * len(kind), "kinds": kind}
            for name, kind in zip("abcd", kinds, strict=True)
        ]
        (photos / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
        columns = opened(photos, labels="l.jsonl")
        feature = columns.schema.of_role("label")[1]
        assert (feature.shape, feature.dtype, feature.classes) == (
            (None,),
            "int64",
            ("cat", "dog"),
        )
        assert [value.tolist() for value in values(columns, "kinds")] == [[0, 1], [], [1], [0]]
        rows[2]["kinds"] = ["cat", "dog"]
        (photos / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
        told = note(opened(photos, labels="l.jsonl"), "'kinds'")
        assert "a value for each box in 2 of 3 rows with boxes" in told

    def test_numbers_of_lists_that_float32_cannot_hold_are_told(self, photos):
        rows = [{"file": f"{name}.png", "v": [33554433, 1e-60]} for name in "abcd"]
        (photos / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
        columns = opened(photos, labels="l.jsonl")
        assert "'v'" in note(columns, "rounded to float32")
        assert "'v'" in note(columns, "nearer to 0")

    def test_what_does_not_match_is_told_at_once(self, photos):
        (photos / "labels.csv").write_text("file,kind\na.png,x\nb.png,\nz.png,x\ny.png,x\n")
        with pytest.raises(DataError) as raised:
            opened(photos, labels="labels.csv")
        text = str(raised.value)
        assert "with its row, and each of those must have its image" in text
        assert "5 without" in text
        for part in (
            "b.png: line 3 has no kind",
            "c.png: has no row in labels.csv",
            "line 4: z.png, which is no image here",
            "line 5: y.png",
        ):
            assert part in text
        columns = opened(photos, labels="labels.csv", skip_bad=True)
        assert columns.num_records == 1
        assert columns.schema.class_label.classes == ("x",)
        assert "3 of 4 images are left out as bad: " in note(columns, "of 4")
        assert columns.left_out == {"image without a whole row": 3, "row without an image": 2}
        assert "2 rows are left out without an image: line 4" in note(columns, "without an image")
        assert not any("no images" in text for text in columns.notes)

    @pytest.mark.parametrize("column", ["filename", "picture"])
    def test_a_column_of_other_files_is_not_passed_over(self, photos, column):
        """For one of numbers, which may be names of files without suffixes."""
        for old, new in zip("abcd", "0123", strict=True):
            (photos / f"{old}.png").rename(photos / f"{new}.png")
        rows = "".join(f"data/{n}.png,{(n + 1) % 4},class{n}\n" for n in range(4))
        (photos / "labels.csv").write_text(f"{column},rank,c\n{rows}")
        with pytest.raises(DataError, match=f"'{column}'.*'data/0.png', where the folder has 0"):
            opened(photos, Asked(label="c"), labels="labels.csv")

    def test_other_files_beside_names_without_suffixes(self, photos):
        rows = "".join(f"{name},https://x/{name}.jpg,{name}\n" for name in "abcd")
        for header in ("image_id,url,c", "image,mask,c"):
            (photos / "labels.csv").write_text(f"{header}\n{rows}")
            columns = opened(photos, Asked(label="c"), labels="labels.csv")
            assert columns.schema.class_label.classes == ("a", "b", "c", "d")

    def test_two_columns_that_name_files(self, photos):
        """Numbers of rows may be names of files too: whose labels they are is not guessed."""
        for old, new in zip("abcd", "0123", strict=True):
            (photos / f"{old}.png").rename(photos / f"{new}.png")
        table = photos / "labels.csv"
        rows = "".join(f"{n},{(n + 1) % 4}.png,{n}.5\n" for n in range(4))
        table.write_text(f"file,nearest,y\n{rows}")
        assert values(opened(photos, labels=table), "y").tolist() == [0.5, 1.5, 2.5, 3.5]
        table.write_text(f"id,picture,y\n{rows}")
        with pytest.raises(DataError, match="'id' and, with their suffixes, 'picture'"):
            opened(photos, labels="labels.csv")
        table.write_text(f"number,picture,y\n{rows}")
        columns = opened(photos, Asked(label="y"), labels="labels.csv")
        np.testing.assert_array_equal(values(columns, "label"), [3.5, 0.5, 1.5, 2.5])

    def test_they_are_read_as_any_table(self, tmp_path):
        """One odd value among twenty is a mistake, unless all are said to be text."""
        for n in range(20):
            save(tmp_path / f"photos/{n}.png")
        rows = [f"{n},{n}.png,{n % 3 if n else 'x'},1.5,{n}" for n in range(20)]
        text = "\n".join([",file,kind,sample_weight,id", *rows])
        (tmp_path / "l.csv").write_bytes(text.encode("utf-16"))
        with pytest.raises(DataError, match=r"0\.png: line 2 has 'x' in column 'kind' of numbers"):
            opened(tmp_path / "photos", labels=tmp_path / "l.csv")
        columns = opened(tmp_path / "photos", Asked(text="kind"), labels=tmp_path / "l.csv")
        assert columns.schema.class_label.classes == ("0", "1", "2", "x")
        assert [feature.role for feature in columns.schema.features] == ["input", "label", "weight"]
        assert dict(columns.roles)["id"] == "dropped (it numbers the rows)"

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("l.csv", "file,kind\na.png,x\na.png,y\n", r"1 rows that name one again: a\.png in l"),
            (
                "l.csv",
                "file,kind\na.png\nb.png,x\nc.png\n",
                "line 2: 1, where.*line 4: 1",
            ),
            ("l.csv", "file\na.png\n", "a label beside the column 'file'"),
            ("l.csv", "what,kind\nx,y\n", "columns what, kind, none of which names one"),
            ("l.csv", "file,kind\na.PNG,x\n", r"\('a\.PNG', where the folder has a\.png\)"),
            ("l.csv", "", "each once, but found an empty line"),
            ("l.csv", "file,kind\n", "must have rows below its header"),
            ("l.csv", "file,kind,kind\na.png,x,y\n", "each once"),
            (
                "l.jsonl",
                "\n".join(f'{{"file": "{n}.png", "b": [[1, NaN]]}}' for n in "abcd"),
                "'b' holds lists of several kinds",
            ),
            ("l.jsonl", '{"file": "a.png"\n[]\n', r"an error .* in line 1; \[\] in line 2"),
            (
                "l.jsonl",
                "\n".join(
                    json.dumps({"file": f"{n}.png", "b": b, "c": c})
                    for n, b, c in zip(
                        "abcd",
                        [[[1, 2]], [[1, 2, 3]], [], []],
                        [["a"], [2], [], []],
                        strict=True,
                    )
                ),
                "'b' holds lists of 2 and 3 numbers, 'c' holds lists of several kinds",
            ),
            (
                "l.jsonl",
                "\n".join(
                    json.dumps({"file": f"{n}.png", "c": c})
                    for n, c in zip("abcd", [1, [2], 3, 4], strict=True)
                ),
                r"line 2 has '\[2\]' in column 'c' of numbers",
            ),
            (
                "l.csv",
                "file,score\na.png,0.5\nb.png,inf\nc.png,1\nd.png,1\n",
                r"line 3 has 'inf, beyond float32' in column 'score' of numbers",
            ),
            (
                "l.csv",
                "file,split,kind\na.png,train,x\nb.png,trian,y\nc.png,val,x\nd.png,train,y\n",
                r"must name one of .* in column 'split', or none, but found 'trian' in line 3",
            ),
            ("l.csv", "file,kind\nd.png,1\nb.png,-1\nc.png,2\na.png,3\n", "-1 in 'label', line 3"),
            (
                "l.csv",
                "file,image,kind\na.png,1,x\nb.png,2,y\nc.png,3,x\nd.png,4,y\n",
                "'image' twice. Rename that column, or leave it out with drop='image'",
            ),
            ("none.csv", None, r"none\.csv, which is no file"),
        ],
    )
    def test_bad_tables(self, photos, name, text, message):
        if text is not None:
            (photos / name).write_text(text)
        with pytest.raises(DataError, match=message):
            opened(photos, labels=name)


def test_the_program_is_warned_as_before(tmp_path, monkeypatch):
    """Threads that each left the filters of warnings as they had found them left them to ignore."""
    monkeypatch.setattr(files, "_AT_ONCE", 1)
    for n in range(200):
        save(tmp_path / f"{'ab'[n % 2]}/{n}.png")
    before, interval = list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        opened(tmp_path, workers=8)
    finally:
        sys.setswitchinterval(interval)
    assert warnings.filters == before


class TestMasks:
    @pytest.fixture
    def photos(self, tmp_path):
        """Three photos of unequal size; a mask of gray, of colours, and of bits."""
        self.numbers = [noise(6 + n, 8, 1, most=5) for n in range(3)]
        for n, numbers in enumerate(self.numbers):
            save_pixels(tmp_path / f"photos/{n}.jpg", noise(6 + n, 8))
            mask = Image.fromarray(numbers if n < 2 else numbers > 2)
            if n == 1:
                mask.putpalette([200, 0, 0] * 5)
            (tmp_path / "masks").mkdir(exist_ok=True)
            mask.save(tmp_path / f"masks/{n}.png")
        return tmp_path / "photos"

    def test_numbers_are_kept(self, photos, tmp_path):
        columns = opened(photos, masks=tmp_path / "masks")
        image, mask = columns.schema.features
        assert (image.shape, image.role) == ((None, None, 3), "input")
        assert (mask.shape, mask.role, mask.encoding, mask.dtype) == (
            (None, None, 1),
            "label",
            "png",
            "uint8",
        )
        stored = [np.asarray(Image.open(io.BytesIO(data))) for data in values(columns, "mask")]
        np.testing.assert_array_equal(stored[0], self.numbers[0])
        np.testing.assert_array_equal(stored[1], self.numbers[1])
        np.testing.assert_array_equal(stored[2], self.numbers[2] > 2)
        assert "1 of 3 masks are written with the numbers of their colours" in str(columns.notes)
        assert "1 of 3 masks are written with 0 and 1" in str(columns.notes)

    def test_they_may_lie_within_the_source(self, photos, tmp_path):
        for name in "012":
            (tmp_path / "photos" / f"{name}.jpg").rename(tmp_path / f"{name}.jpg")
        (tmp_path / "photos").rmdir()
        assert opened(tmp_path, masks=tmp_path / "masks").num_records == 3
        (tmp_path / "images").mkdir()
        for name in "012":
            (tmp_path / f"{name}.jpg").rename(tmp_path / "images" / f"{name}.jpg")
        assert opened(tmp_path, masks=tmp_path / "masks").num_records == 3

    def test_either_form_of_an_umlaut(self, photos, tmp_path):
        """Of which macOS writes one and others the other."""
        (photos / "0.jpg").rename(photos / "a\u0308.jpg")
        (tmp_path / "masks/0.png").rename(tmp_path / "masks/\xe4.png")
        assert opened(photos, masks=tmp_path / "masks").num_records == 3

    def test_sixteen_bits_of_the_other_byte_order(self, tmp_path):
        """Pillow itself makes 255 of all that is more."""
        numbers = np.array([[1, 300], [65535, 7]], ">u2")
        for folder in ("photos", "masks"):
            (tmp_path / folder).mkdir()
            Image.fromarray(numbers).save(tmp_path / folder / "a.tif")
        with Image.open(tmp_path / "masks/a.tif") as image:
            assert image.mode == "I;16B"
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        for feature in columns.schema.features:
            stored = Image.open(io.BytesIO(values(columns, feature.name)[0]))
            np.testing.assert_array_equal(np.asarray(stored), numbers)

    def test_what_does_not_fit(self, photos, tmp_path):
        masks = tmp_path / "masks"
        save(masks / "1.png", size=(3, 3), mode="L")
        save(masks / "2.png", size=(8, 8))
        (masks / "0.png").rename(masks / "x.png")
        save(masks / "1.bmp", size=(8, 7), mode="L")
        with pytest.raises(DataError) as raised:
            opened(photos, masks=masks)
        text = str(raised.value)
        for part in (
            "0.jpg: has no mask",
            "1.jpg: has two masks, 1.bmp and 1.png",
            "2.jpg: its mask: PNG of mode RGB where a mask must be a PNG of one channel",
            "the mask x.png, which has no image",
        ):
            assert part in text
        (masks / "1.bmp").unlink()
        with pytest.raises(DataError, match=r"1\.jpg: 8x7 pixels where its mask has 3x3"):
            opened(photos, masks=masks)
        with pytest.raises(DataError, match="masks must name a folder"):
            opened(photos, masks=tmp_path / "nowhere")

    def test_what_is_no_number_or_not_of_one_photo(self, tmp_path):
        """Readers make grays of what has fewer bits: 1 of 0 to 15 is then 17."""
        numbers = np.array([[0, 1, 2, 4]], np.int32)
        for n in range(4):
            save(tmp_path / f"photos/{n}.png", size=(4, 1))
        save(tmp_path / "photos/3.bmp", size=(4, 1))
        masks = tmp_path / "masks"
        save_pixels(masks / "0.tif", numbers)
        save_pixels(masks / "1.tif", numbers - 1)
        (masks / "2.pgm").write_bytes(b"P5\n4 1\n4\n" + bytes([0, 1, 2, 4]))
        (masks / "3.png").write_bytes(gray_png(4, bits=4, row=b"\0\x01\x24"))
        with pytest.raises(DataError) as raised:
            opened(tmp_path / "photos", masks=masks)
        for part in (
            "1.png: its mask: numbers from -1 to 3, not 0 to 65535",
            "2.png: its mask: PPM of numbers up to 4, which are read as grays",
            "3.bmp: has a mask, 3.png, that is of 3.bmp and 3.png",
        ):
            assert part in str(raised.value)
        (tmp_path / "photos/3.bmp").unlink()
        with pytest.raises(DataError, match=r"3\.png: its mask: PNG of grays of the kind L;4"):
            opened(tmp_path / "photos", masks=masks)
        columns = opened(tmp_path / "photos", masks=masks, skip_bad=True)
        stored = Image.open(io.BytesIO(values(columns, "mask")[0]))
        np.testing.assert_array_equal(np.asarray(stored), numbers)

    def test_a_bitmap_that_is_text(self, tmp_path):
        save(tmp_path / "photos/a.png", size=(4, 1))
        (tmp_path / "masks").mkdir()
        (tmp_path / "masks/a.pbm").write_bytes(b"P1\n4 1\n0 1 1 0\n")
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        stored = Image.open(io.BytesIO(values(columns, "mask")[0]))
        np.testing.assert_array_equal(np.asarray(stored), [[1, 0, 0, 1]])

    @pytest.mark.parametrize("kind", ["gif", "bmp", "tif", "pgm"])
    def test_grays_of_8_bits_are_numbers(self, tmp_path, kind):
        numbers = np.array([[0, 1, 2, 3]], np.uint8)
        save(tmp_path / "photos/a.png", size=(4, 1))
        save_pixels(tmp_path / f"masks/a.{kind}", numbers)
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        stored = Image.open(io.BytesIO(values(columns, "mask")[0]))
        np.testing.assert_array_equal(np.asarray(stored), numbers)

    def test_frames_that_are_not_written_are_told(self, tmp_path):
        save(tmp_path / "photos/a.png")
        mask = Image.new("L", (4, 3), 1)
        save(tmp_path / "masks/a.tif", mode="L", save_all=True, append_images=[mask])
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        assert "1 of 1 masks have several frames" in note(columns, "frames")
        more = Image.new("RGB", (4, 3), 1)
        save(tmp_path / "animated/x/a.png", save_all=True, append_images=[more])
        assert "1 of 1 images have several frames" in note(opened(tmp_path / "animated"), "frames")

    def test_classes_of_one_split_alone_are_none(self, tmp_path):
        for place in ("train/a/0", "train/b/1", "val/2"):
            save(tmp_path / f"photos/{place}.png")
            save(tmp_path / f"masks/{place.rpartition('/')[2]}.png", mode="L")
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        assert [feature.name for feature in columns.schema.features] == ["image", "mask"]
        assert "the names of class folders are not used" in columns.notes

    def test_class_folders_keep_their_classes(self, tmp_path):
        for name in ("a/1", "b/1"):
            save(tmp_path / f"photos/{name}.jpg")
            save(tmp_path / f"masks/{name}.png", mode="L")
        columns = opened(tmp_path / "photos", masks=tmp_path / "masks")
        assert [f.name for f in columns.schema.of_role("label")] == ["label", "mask"]


class TestWrittenAnew:
    @pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
    def test_pixels_are_pillows(self, tmp_path, fit):
        pixels = noise(10, 20)
        save_pixels(tmp_path / "c/a.png", pixels)
        save_pixels(tmp_path / "c/b.jpg", noise(12, 9))
        options = image_options(resize="8x6", fit=fit, color=None, write_resized=True)
        columns = read_raw(tmp_path, images=options)
        image = columns.schema.features[0]
        assert (image.shape, image.encoding) == ((8, 6, 3), "image")
        png, jpeg = values(columns)
        assert jpeg.startswith(b"\xff\xd8")
        assert Image.open(io.BytesIO(jpeg)).size == (6, 8)
        source = Image.fromarray(pixels)
        if fit == "stretch":
            known = np.asarray(source.resize((6, 8), Image.Resampling.LANCZOS))
        elif fit == "crop":  # 20 wide, of which 7.5 are left for 6 over 8
            box = (6.25, 0, 13.75, 10)
            known = np.asarray(source.resize((6, 8), Image.Resampling.LANCZOS, box=box))
        else:
            known = np.zeros((8, 6, 3), np.uint8)
            known[2:5] = np.asarray(source.resize((6, 3), Image.Resampling.LANCZOS))
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), known)
        assert "all images are rewritten in 8x6" in note(columns, "rewritten")

    def test_sixteen_bits_and_masks(self, tmp_path):
        wide = RNG.integers(0, 1 << 16, (4, 4), np.uint16)
        save_pixels(tmp_path / "photos/a.png", wide)
        save_pixels(tmp_path / "masks/a.png", noise(4, 4, 1, most=2) * 255)
        options = image_options(
            resize="2x2", fit=None, color=None, write_resized=True, masks=tmp_path / "masks"
        )
        columns = read_raw(tmp_path / "photos", images=options)
        image, mask = columns.schema.features
        assert (image.shape, image.dtype, mask.shape) == ((2, 2, 1), "uint16", (2, 2, 1))
        small = np.asarray(Image.open(io.BytesIO(values(columns)[0])))
        assert small.max() > 256
        assert abs(small.mean() - wide.mean()) < 8000
        numbers = np.asarray(Image.open(io.BytesIO(values(columns, "mask")[0])))
        assert set(np.unique(numbers)) <= {0, 255}


def test_readings_are_the_manifests(tmp_path):
    for n in range(4):
        save(tmp_path / f"photos/c/{n}.jpg", size=(4 + n, 5))
    write(
        tmp_path / "photos",
        tmp_path / "out",
        split="train=1",
        num_shards=1,
        resize="6x8",
        fit="pad",
        color="gray",
    )
    image = load_manifest(tmp_path / "out").schema.features[0]
    assert (image.shape, image.read_shape, image.reading.fit) == ((None, None, 3), (6, 8, 1), "pad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "crop"}, r"fit='crop' must go with resize"),
        ({"write_resized": True}, r"write_resized=True must go with resize"),
        ({"resize": "8"}, "resize must be HEIGHTxWIDTH"),
        ({"resize": "8x8", "fit": "bend"}, "bend"),
        ({"resize": "8x8", "write_resized": True, "fit": "bend"}, "bend"),
        ({"color": "blue"}, "blue"),
    ],
)
def test_options_that_cannot_hold(tmp_path, options, message):
    save(tmp_path / "photos/c/a.png")
    with pytest.raises(OptionError, match=message):
        write(tmp_path / "photos", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [{"labels": "x.csv"}, {"masks": "m"}, {"skip_bad": True}])
def test_options_of_folders_alone(option):
    with pytest.raises(
        OptionError, match=f"{next(iter(option))}.* must go with a folder of images"
    ):
        opened("digits", **option)
