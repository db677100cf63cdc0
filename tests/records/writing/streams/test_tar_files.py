"""Archives of webdataset: parts of records by their stems."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

import tfdist
from tfdist.errors import DataError
from tfdist.records import write


def save(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def jpeg(number):
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (number, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_parts_of_records(tmp_path, name, mode):
    files = {}
    for n in range(12):
        files[f"d/{n:03d}.jpg"] = jpeg(n * 20)
        files[f"d/{n:03d}.cls"] = str(n % 3).encode()
        files[f"d/{n:03d}.json"] = f'{{"age": {n}.5, "place": "p{n}"}}'.encode()
        files[f"d/{n:03d}.box.npy"] = array(np.full((n % 2 + 1, 4), n, np.float32))
        files[f"d/{n:03d}.exe"] = b"x"
    source = save(tmp_path / name, files, mode)
    opened = []
    manifest = write(source, tmp_path / "data", split="train=1", num_shards=1, opened=opened.append)
    found = {f.name: (f.role, f.encoding, f.shape) for f in manifest.schema.features}
    assert found == {
        "image": ("input", "jpeg", (4, 5, 3)),
        "label": ("label", "int64", ()),
        "age": ("input", "raw", ()),
        "place": ("input", "bytes", ()),
        "box": ("input", "float", (None, 4)),
    }
    data = (tmp_path / "data/train-00000-of-00001.tfrecord").read_bytes()
    assert all(data.count(jpeg(n * 20)) == 1 for n in range(12))
    assert list(opened[0].notes) == ["12 files are left out as of kinds that are not read: 12 .exe"]
    assert manifest.source == "tar"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found none"),
        ({"a.md": b"x"}, "found none"),
        (
            {"a.cls": b"1", "a.txt": b"x", "d/b.txt": b"y"},
            r"'label'.*found text in d/b\.\* of .*a\.tar in record 1",
        ),
        ({"a.txt": b"x", "a.json": b'{"age": 1, "age": 2}'}, r"a\.json: 'age' twice"),
        ({"a.txt": b"x", "a.json": b"[" * 100_000}, r"a\.json: too many levels"),
        ({"a.txt": b"x", "a.npy": b""}, r"every \.npy file.*a\.npy: "),
        ({"a.txt": b"x", "a.npy": b"PK\3\4"}, r"every \.npy file.*a\.npy: "),
        (
            {"a.txt": b"x", "a.npy": array(np.ones(2)).replace(b"(2,)", b"(9999999999999,)")},
            r"every \.npy file.*a\.npy: ",
        ),
        # Were it taken for text, so would be the photos behind it.
        ({"a.jpg": b"none", "b.jpg": jpeg(1)}, r"is no image in a\.jpg"),
        ({"a.cls": b"dog", "a.txt": b"x"}, r"every \.cls file.*a\.cls"),
        ({"a.jpg": b"1", "a.png": b"x"}, "'image' twice, again in a.png"),
        (
            {"a.jpg": jpeg(1), "d/b.jpg": jpeg(2)[:-40], "d/c.jpg": jpeg(3)[:-40]},
            r"in d/b\.jpg, .* in d/c\.jpg\. Repair .* with skip_bad=True",
        ),
    ],
)
def test_archives_that_cannot_be_read(tmp_path, files, message):
    source = save(tmp_path / "a.tar", files)
    with pytest.raises(DataError, match=message):
        write(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_archive_that_ends_early(tmp_path):
    source = save(tmp_path / "a.tar", {f"{n}.jpg": jpeg(n * 20) for n in range(9)})
    source.write_bytes(source.read_bytes()[:3000])
    with pytest.raises(DataError, match="must be a whole"):
        write(source, tmp_path / "data")


def test_an_archive_that_was_cut_between_two_files_is_told(tmp_path, capsys):
    source = save(tmp_path / "a.tar", {f"{n}.txt": b"x" for n in range(9)})
    write(source, tmp_path / "whole")
    assert "cut" not in capsys.readouterr().out
    source.write_bytes(source.read_bytes()[: 6 * 1024])
    manifest = write(source, tmp_path / "data")
    assert sum(split.records for split in manifest.splits.values()) == 6
    assert "a.tar lacks the mark that ends an archive: it may have been cut" in (
        capsys.readouterr().out
    )


def test_an_archive_is_read_to_its_end(tmp_path):
    """Where tarfile stops, as at a damaged header, without an error."""
    source = save(tmp_path / "a.tar", {f"{n}.txt": b"x" for n in range(9)})
    whole = source.read_bytes()
    damaged = whole[: 4 * 1024] + b"\xff" + whole[4 * 1024 + 1 :]
    for data, message in ((damaged, "bad checksum"), (whole * 2, "more behind its end, as cat")):
        source.write_bytes(data)
        with pytest.raises(DataError, match=f"must be a whole .tar archive.*{message}"):
            write(source, tmp_path / "data")


def test_gzip_is_read_to_its_end_and_checked(tmp_path):
    data = save(tmp_path / "a.tar", {f"{n}.txt": b"x" for n in range(9)}).read_bytes()
    source = tmp_path / "b.tgz"
    source.write_bytes(gzip.compress(data[:2000]) + gzip.compress(data[2000:]))
    manifest = write(source, tmp_path / "data", split="train=1")
    assert manifest.splits["train"].records == 9
    whole = gzip.compress(data)
    source.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    with pytest.raises(DataError, match=r"must be a whole \.tar archive.*CRC"):
        write(source, tmp_path / "other")


def test_files_without_an_extension_are_told(tmp_path, capsys):
    source = save(tmp_path / "a.tar", {"README": b"x", **{f"{n}.txt": b"x" for n in range(9)}})
    write(source, tmp_path / "data")
    assert "of kinds that are not read: 1 without an extension" in capsys.readouterr().out


def test_links_are_told(tmp_path, capsys):
    source = save(tmp_path / "a.tar", {f"{n}.txt": b"x" for n in range(9)})
    with tarfile.open(source, "a") as archive:
        link = tarfile.TarInfo("9.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "8.txt"
        archive.addfile(link)
    write(source, tmp_path / "data")
    assert "1 file is left out as of kinds that are not read: 1 .txt (a link)" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("head_bytes", [1, 1 << 20])
def test_bad_records_are_left_out_and_counted(tmp_path, monkeypatch, head_bytes):
    monkeypatch.setattr("tfdist.records.writing.streams.writer.HEAD_BYTES", head_bytes)
    monkeypatch.setattr("tfdist.records.writing.streams.stream._CHUNK_RECORDS", 2)
    files = {f"{n}.jpg": jpeg(n * 20) for n in range(5)} | {"9.jpg": jpeg(0)}
    files |= {"0.jpg": jpeg(0)[:-40], "2.jpg": jpeg(2)[:-40]}
    files = {name: data for n in files for name, data in ((n, files[n]), (f"{n[0]}.cls", b"1"))}
    files["9.cls"] = b"dog"
    source = save(tmp_path / "a.tar", files)
    opened = []
    options = {"split": "train=1", "num_shards": 1, "opened": opened.append}
    manifest = write(source, tmp_path / "data", skip_bad=True, **options)
    assert manifest.splits["train"].records == 3
    assert manifest.left_out == {"unreadable image": 2, "unreadable .cls file": 1}
    note = opened[0].notes[0]
    assert note.startswith("3 of 6 records are left out as bad: 0.jpg: ")
    bad = {name: files[name] for name in ("0.jpg", "2.jpg")}
    with pytest.raises(DataError, match=r"a record that can be read.*2 of 2 records .*0\.jpg"):
        write(save(tmp_path / "b.tar", bad), tmp_path / "none", skip_bad=True)


def test_unequal_sizes_are_told(tmp_path):
    large = io.BytesIO()
    Image.new("RGB", (9, 9)).save(large, "PNG")
    source = save(tmp_path / "a.tar", {"a.jpg": jpeg(1), "b.png": large.getvalue()})
    opened = []
    options = {"split": "train=1", "num_shards": 1}
    for name, resize in (("data", None), ("resized", "4x4")):
        write(source, tmp_path / name, resize=resize, **options, opened=opened.append)
    assert [note for columns in opened for note in columns.notes] == [
        "the images 'image' have several sizes: to be read in batches they need one, resize='HxW'"
    ]


def mask(mode):
    """Returns the numbers of classes as a PNG of Pillow's mode."""
    image = Image.fromarray(np.array([[0, 1, 1], [1, 0, 0]], np.uint8))
    if mode == "1":
        image = image.point([0, 255] * 128).convert("1")
    elif mode == "P":
        image.putpalette([250, 10, 10, 10, 250, 10])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("mode", ["1", "P", "L"])
def test_labels_that_are_masks_are_their_numbers(tmp_path, mode):
    files = {}
    for n in range(3):
        files |= {f"{n}.jpg": jpeg(n), f"{n}.mask.png": mask(mode)}
    options = {"split": "train=1", "num_shards": 1, "label": "mask", "skip_bad": True}
    opened = []
    source = save(tmp_path / "a.tar", files)
    manifest = write(source, tmp_path / "data", **options, opened=opened.append)
    assert manifest.left_out == {}
    (batch,) = tfdist.records.read(tmp_path / "data", batch_size=3, cache=False)
    np.testing.assert_array_equal(batch[1][..., 0], [[[0, 1, 1], [1, 0, 0]]] * 3)
    told = "3 images 'mask' have few or numbered colours: as labels, their pixels are the numbers"
    assert any(note.startswith(told) for note in opened[0].notes) == (mode != "L")


def test_labels_are_all_photos_or_all_masks(tmp_path):
    files = {"0.jpg": jpeg(0), "0.mask.png": mask("P"), "1.jpg": jpeg(1), "1.mask.png": jpeg(1)}
    with pytest.raises(DataError, match=r"must all be photos, or all masks .* found both, by rec"):
        write(
            *(save(tmp_path / "a.tar", files), tmp_path / "data"),
            split="train=1",
            num_shards=1,
            label="mask",
        )


def gray_of_2_bits():
    """Returns a PNG whose numbers 0 to 3 are read as grays 0 to 255."""
    head = struct.pack(">IIBBBBB", 4, 1, 2, 0, 0, 0, 0)
    parts = {b"IHDR": head, b"IDAT": zlib.compress(b"\0\x1b"), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_labels_whose_numbers_no_reader_gives_are_told(tmp_path):
    files = {"0.jpg": jpeg(0), "0.mask.png": gray_of_2_bits(), "1.jpg": jpeg(1)}
    source = save(tmp_path / "a.tar", files | {"1.mask.png": mask("L")})
    with pytest.raises(DataError, match=r"'mask' must be an image .*L;2, which are not read as nu"):
        write(source, tmp_path / "none", label="mask")
    options = {"split": "train=1", "num_shards": 1, "label": "mask", "skip_bad": True}
    assert write(source, tmp_path / "data", **options).left_out == {"unreadable image": 1}
    source = save(tmp_path / "b.tar", {"0.jpg": jpeg(0), "0.seen.png": gray_of_2_bits()})
    write(source, tmp_path / "seen", split="train=1")  # As an input it is a photo of four grays.
