"""tfdist shard, from the command line to the files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tfdist.records import check, load_manifest


def test_digits(tfdist, tmp_path):
    code, out, err = tfdist("shard", "digits", "data", "--num-shards", "2", "--stratify")
    assert (code, err) == (0, "")
    assert "1,498" in out
    assert out.rstrip().endswith("next: tfdist inspect data --check")
    manifest = load_manifest(tmp_path / "data")
    assert manifest.stratified
    assert [shard.file for shard in manifest.splits["train"].shards] == [
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
    ]
    assert check(tmp_path / "data") == []
    assert "test" not in manifest.splits


def test_every_option(tfdist, tmp_path):
    (tmp_path / "t.csv").write_text(
        "kind,a\n" + "".join(f"{'xyz'[n % 3]},{n}\n" for n in range(40))
    )
    options = "--label kind --split train=2,validation=1,test=1 --seed 5 --compression gzip"
    code, _, err = tfdist("shard", "t.csv", "out/data", *options.split(), "--workers", "2")
    assert (code, err) == (0, "")
    manifest = load_manifest(tmp_path / "out" / "data")
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 20,
        "validation": 10,
        "test": 10,
    }
    assert (manifest.seed, manifest.compression) == (5, "gzip")
    assert manifest.schema.class_label.classes == ("x", "y", "z")


def save_images(folder, sizes):
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / f"{number}.png")


def test_images_and_arrays(tfdist, tmp_path):
    save_images(tmp_path / "photos" / "a", [(4, 4)] * 12)
    np.savez(tmp_path / "a.npz", x=np.zeros((12, 2)), y=np.zeros(12, int))
    assert tfdist("shard", "photos", "one", "--num-shards", "1")[0] == 0
    assert tfdist("shard", "a.npz", "two", "--num-shards", "1")[0] == 0


def test_photos_as_they_come(tfdist, tmp_path):
    """Of unequal size, in splits, with a file that is none and one that is broken."""
    for split, count in (("train", 8), ("val", 3)):
        for kind in "ab":
            save_images(tmp_path / "photos" / split / kind, [(4 + n, 9 - n) for n in range(count)])
    (tmp_path / "photos" / "README.txt").write_text("x")
    (tmp_path / "photos" / "train" / "a" / "x.jpg").write_bytes(b"x")
    options = "--resize 6x6 --pad --color gray --skip-bad --num-shards 2"
    code, out, err = tfdist("shard", "photos", "data", *options.split())
    assert (code, err) == (0, "")
    assert "tfdist: 1 of 23 images is left out as bad: photos/train/a/x.jpg: is no image\n" in out
    assert "tfdist: 1 file is left out as no images: README.txt\n" in out
    manifest = load_manifest(tmp_path / "data")
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 16,
        "validation": 6,
    }
    image = manifest.schema.features[0]
    assert (image.shape, image.read_shape, image.reading.fit) == (
        (None, None, 3),
        (6, 6, 1),
        "pad",
    )
    assert manifest.left_out == {"unreadable image": 1}
    code, out, _ = tfdist("inspect", "data", "--check")
    assert code == 0
    assert "│ unreadable image │       1 │" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "out"], "'nowhere', which does not exist"),
        (["ragged.csv", "out"], "1 in line 3"),
        (["missing.csv", "out"], "line 2, column 'a'"),
        (["photos", "out"], "photos/a/2.png: is no image. Repair or remove them, or leave"),
        (["photos", "out", "--crop"], "--crop must go with --resize"),
        (["photos", "out", "--resize", "8x8", "--crop", "--pad"], "must not go together"),
        (["photos", "out", "--labels", "photos/none.csv"], "none.csv, which is no file"),
        (["digits", "out", "--skip-bad"], "--skip-bad must go with a folder of images"),
        (["negative.npz", "out"], "-1 in 'y'"),
        (["digits", "full"], "new or empty folder"),
        (["digits", "out", "--num-shards", "2000"], "1498 records for 2000 shards"),
        (["digits", "out", "--num-shards", "0"], "num_shards must be at least 1"),
        (["digits", "out", "--split", "train=1,test=0"], "share of split 'test'"),
        (
            ["digits", "out", "--split", "train=9999,test=1"],
            "split 'test' must have at least one record",
        ),
        (["digits", "out", "--compression", "zip"], "zip"),
        (["digits", "out", "--label", "x"], "must go with a table or a .npz file"),
        (["digits"], "Missing argument 'OUT'"),
        (["digits", "out", "--resume"], "must find the shards of a run that was ended"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tfdist, tmp_path, args, message):
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "missing.csv").write_text("a,b\n,2\n3,4\n")
    save_images(tmp_path / "photos" / "a", [(4, 4), (5, 4)])
    (tmp_path / "photos" / "a" / "2.png").write_bytes(b"")
    np.savez(tmp_path / "negative.npz", x=np.zeros(2), y=np.array([0, -1]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = tfdist("shard", *args)
    assert (code, out) == (2, "")
    assert err.startswith("tfdist: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_help_shows_examples(tfdist):
    code, out, _ = tfdist("shard", "--help")
    assert code == 0
    assert "tfdist shard digits data/digits" in out


def test_clients(tfdist, tmp_path):
    options = "--clients 30 --partition dirichlet:0.3"
    code, out, err = tfdist("shard", "digits", "fed", *options.split())
    assert (code, err) == (0, "")
    assert "1,498" in out
    manifest = load_manifest(tmp_path / "fed")
    assert len(manifest.splits["train"].clients) == 30
    assert not manifest.splits["validation"].has_clients
    code, _, err = tfdist("shard", "digits", "by_digit", "--partition", "by:label")
    assert (code, err) == (0, "")
    assert len(load_manifest(tmp_path / "by_digit").splits["train"].clients) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--partition iid", "--clients N"),
        ("--clients 3 --num-shards 3", "Leave the number of shards out"),
        ("--clients 2000", "1498 records for 2000 clients"),
        ("--clients 3 --partition dirichlet:x", "positive number"),
        (
            "--clients 3 --partition skewed",
            "Choose one of iid, dirichlet:ALPHA, shards:K, by:COLUMN",
        ),
    ],
)
def test_clients_that_cannot_be(tfdist, tmp_path, options, message):
    code, out, err = tfdist("shard", "digits", "fed", *options.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_what_became_what_is_told(tfdist, tmp_path):
    names = [f"f{n}" for n in range(25)]
    rows = "".join(f"{n},{','.join('1' for _ in names)},{n % 2},{n % 3}\n" for n in range(20))
    (tmp_path / "t.csv").write_text(f"id,{','.join(names)},even,third\n" + rows)
    options = ["--label", "even,third", "--drop", "id", "--num-shards", "1"]
    code, out, err = tfdist("shard", "t.csv", "data", *options)
    assert (code, err) == (0, "")
    became = dict(line.split("│")[1:3] for line in out.splitlines() if line.count("│") == 3)
    became = {name.strip(): role.strip() for name, role in became.items()}
    assert (became["id"], became["even"], became["third"]) == ("dropped", "label", "label")
    assert (became["f19"], became["and 5 more"]) == ("input", "input")
    assert "f20" not in became
    schema = load_manifest(tmp_path / "data").schema
    assert [feature.name for feature in schema.of_role("label")] == ["even", "third"]
    assert schema.of_role("input")[0].shape == (25,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "but found label, target"),
        (("--label", "label"), "found column target beside the label label"),
        (("--label", "lable"), "Write 'label'"),
        (("--label", "label,label"), "once, but found label, label"),
        (("--label", "label,target", "--drop", "target"), "two for target"),
    ],
)
def test_columns_that_may_be_labels_are_asked_for(tfdist, tmp_path, options, message):
    (tmp_path / "t.csv").write_text("a,label,target\n1,0,1\n2,1,0\n")
    code, out, err = tfdist("shard", "t.csv", "data", *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "data").exists()


def test_a_messy_table(tfdist, tmp_path):
    lines = ["id;size;colour;note;by;label", "1;1,5;red;fine;ann;a", "2;;red;;bob;b", "3;2;blue"]
    lines += [
        f"{n};{n},25;{'red' if n % 2 else 'blue'};text {n};cy;{'ab'[n % 2]}" for n in range(4, 40)
    ]
    (tmp_path / "t.csv").write_bytes("\n".join(lines).replace("fine", "größe").encode("cp1252"))
    code, out, err = tfdist("shard", "t.csv", "data", "--ignore", "by")
    assert (code, out) == (2, "")
    assert "3 in line 4" in err
    assert "'' in line 3, column 'size'" in err
    assert err.count("\n") == 1
    options = ["--ignore", "by", "--skip-bad", "--missing", "mask", "--text", "note"]
    code, out, err = tfdist("shard", "t.csv", "data", *options, "--num-shards", "1")
    assert (code, err) == (0, "")
    for told in ("read as Western European", "semicolons", "1 row is left out as bad", "filled"):
        assert told in out
    became = {
        cells[1].strip(): cells[2].strip()
        for line in out.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert became["id"] == "dropped (it numbers the rows)"
    assert became["by"] == "dropped"
    assert became["colour"] == "input (2 categories)"
    assert became["note"] == "input (text)"
    features = load_manifest(tmp_path / "data").schema.of_role("input")
    assert [f.name for f in features] == ["features", "colour", "note", "missing"]
    assert features[1].classes == ("blue", "red")
    assert check(tmp_path / "data") == []


def test_options_of_tables_go_with_tables_alone(tfdist, tmp_path):
    for option in ("--text", "--categories", "--missing", "--weight"):
        code, out, err = tfdist("shard", "digits", "data", option, "x")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "must go with a table" in err
    assert list(tmp_path.iterdir()) == []
