"""Archives of webdataset: parts of records by their stems."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

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
        ({"a.cls": b"1", "a.txt": b"x", "b.txt": b"y"}, r"'label'.*in record 1"),
        ({"a.cls": b"dog", "a.txt": b"x"}, r"every \.cls file.*a\.cls"),
        ({"a.jpg": b"1", "a.png": b"x"}, "'image' twice, again in a.png"),
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
