"""Predictions in parts: joined they are what one run writes, and nothing else is joined."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tfdist
from tfdist.errors import DataError, OptionError
from tfdist.launch.jobs import Where
from tfdist.records.parts import Part
from tfdist.runs import merged_files, predict_rank, predicting, prediction_table
from tfdist.runs.prediction_parts import Share, digests_of, merge, write_note
from tfdist.training.engine import model_path

pytestmark = pytest.mark.timeout(180)
_MODEL = """
from tensorflow import keras

def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model

def of_photos():
    model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(2))
    model.compile("sgd", "mse")
    return model
"""
_RECORDS, _BATCH = 23, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Records whose shards end within batches, and photos."""
    folder = tmp_path_factory.mktemp("parts")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(_RECORDS, 8)).astype(np.float32), np.arange(_RECORDS) % 3
    tfdist.records.write(rows, folder / "data", split="test=1", num_shards=3)
    (folder / "photos" / "cat").mkdir(parents=True)
    for number in range(9):
        photo = rng.integers(0, 255, (5, 5, 3), np.uint8)
        Image.fromarray(photo).save(folder / "photos" / "cat" / f"{number}.png")
    tfdist.records.write(folder / "photos", folder / "of_photos", split="train=1", resize="4x4")
    (folder / "model.py").write_text(_MODEL)
    for name in ("model_fn", "of_photos"):
        model_path.load(f"{folder / 'model.py'}:{name}")().save(folder / f"{name}.keras")
    return folder


@pytest.fixture
def asked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return {
        "model": "model.py:model_fn",
        "weights": "model_fn.keras",
        "data": "data/test",
        "strategy": "single",
        "global_batch_size": _BATCH,
    }


def test_parts_joined_are_the_bytes_of_one_run(asked, folder):
    """The first part ends within a shard; another strategy gives the same numbers."""
    tfdist.predict(**asked, output="one.csv")
    found = tfdist.predict(**asked, output="all.csv", part="1/2")
    assert found.output == Path("all.part-1-of-2.csv")
    assert found.outputs == {"predictions": ((12, 3), "float32")}
    words = r"1 of 2 missing.*: 2. Make each: .* --strategy single --part 2/2 --resume`"
    with pytest.raises(DataError, match=words):
        merge(Path("all.csv"))
    assert not Path("all.csv").exists()
    ranks = {"strategy": "horovod", "workers": 2}
    tfdist.predict(**{**asked, **ranks}, output="all.csv", part="2/2", resume=True)
    assert merge(Path("all.csv")) == (2, _RECORDS)
    one, joined = (np.loadtxt(f, str, delimiter=",", skiprows=1) for f in ("one.csv", "all.csv"))
    np.testing.assert_array_equal(joined[:, :3], one[:, :3])
    np.testing.assert_allclose(joined[:, 3].astype(float), one[:, 3].astype(float), rtol=1e-6)
    first = slice(12)
    np.testing.assert_array_equal(joined[first], one[first])
    assert list(folder.glob("all.part-*")) == []


def test_parts_of_photos_read_their_own_alone(asked, folder):
    own = {"model": "model.py:of_photos", "weights": "of_photos.keras", "data": "photos"}
    given = {**asked, **own, "trained_on": "of_photos"}
    tfdist.predict(**given, output="one.jsonl")
    tfdist.predict(**given, output="all.jsonl", part="1/2")
    first = (folder / "photos" / "cat" / "0.png").read_bytes()
    (folder / "photos" / "cat" / "0.png").write_bytes(b"0" * len(first))  # No photo of part 2.
    try:
        tfdist.predict(**given, output="all.jsonl", part="2/2")
    finally:
        (folder / "photos" / "cat" / "0.png").write_bytes(first)
    merge(Path("all.jsonl"))
    assert Path("all.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    rows = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [f"cat/{number}.png" for number in range(9)]


def test_a_whole_part_is_not_made_again_and_a_damaged_one_is(asked, folder, monkeypatch):
    made = []

    def run(program, config, where, take, *, stop=None):
        made.append(config["section"])
        start, stop = config["section"]
        Path(config["output"]).write_text("h\n" + "".join(f"{n}\n" for n in range(start, stop)))
        take(0, {"event": "predicted", "outputs": {"predictions": [[stop - start, 3], "float32"]}})

    monkeypatch.setattr(predicting.ranks, "run", run)
    given = {**asked, "output": "again.csv", "part": "2/3"}
    first = tfdist.predict(**given)
    with pytest.raises(OptionError, match="must be a new file"):
        tfdist.predict(**given)
    again = tfdist.predict(**given, resume=True)
    assert (again, made) == (first, [(8, 16)])
    (folder / "again.part-2-of-3.csv").write_text("h\n")
    tfdist.predict(**given, resume=True)
    assert made == [(8, 16)] * 2
    with pytest.raises(OptionError, match="of another global batch size"):
        tfdist.predict(**{**given, "global_batch_size": 3}, resume=True)
    with monkeypatch.context() as padded:
        padded.setattr(predicting, "padding_of", lambda weights: "batch")
        with pytest.raises(OptionError, match="of another padding"):
            tfdist.predict(**given, resume=True)
    with pytest.raises(OptionError, match=r"at most as many parts.* found 1/7 of 23 records, in 6"):
        tfdist.predict(**{**given, "part": "1/7"})
    with pytest.raises(OptionError, match="must be of a part"):
        tfdist.predict(**{**given, "part": None}, resume=True)


def _write_parts(output: Path, rows: np.ndarray, parts: int, **others: str) -> None:
    """Writes parts as a rank does."""
    for part in Part(1, parts).others:
        share = Share(part, _BATCH)
        own = share.among(len(rows))
        _write(part.path_of(output), rows[own.start : own.stop], own.start)
        told = {"predictions": ((len(own), rows.shape[1]), "float32")}
        digests = dict.fromkeys(("model", "function", "data", "trained_on"), "same")
        digests |= others if part.number == 2 else {}
        write_note(part.path_of(output), share, told, digests, {"output": output})


def _write(path: Path, rows: np.ndarray, first: int = 0) -> None:
    if path.suffix in predicting.TABLES:
        numbers = np.arange(first, first + len(rows))
        names = np.array([f"a\n'{number}', \"é\"" for number in numbers], object)
        columns = {"row": numbers, "class": names, "value": rows[:, 0]}
        prediction_table.write_table(path, columns)
    else:
        texts = np.array([["é" * number] for number in range(first, first + len(rows))])
        several = {"a": rows, "b": rows[:, 0] > 0, "c": texts}
        predict_rank._write(path, several if path.suffix == ".npz" else {"a": rows})


def test_lines_of_other_columns_are_not_joined(tmp_path):
    parts = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    parts[0].write_text('{"record": 0, "class": "cat", "probability": 1.0}\n')
    parts[1].write_text('{"record": 1, "value_0": null, "value_1": 0.2}\n')
    with pytest.raises(DataError, match=r"same columns.*2\.jsonl"):
        merged_files.join(parts, tmp_path / "all.jsonl")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".npy", ".npz", ".parquet"])
def test_each_kind_of_file_is_joined(tmp_path, suffix):
    rows = np.random.default_rng(1).normal(size=(_RECORDS, 5)).astype(np.float32)
    one, joined = tmp_path / f"one{suffix}", tmp_path / f"all{suffix}"
    _write(one, rows)
    _write_parts(joined, rows, 4)
    assert merge(joined)[1] == _RECORDS
    if suffix == ".parquet":
        from pyarrow import parquet

        assert parquet.read_table(joined).equals(parquet.read_table(one))
    elif suffix == ".npz":
        with np.load(one) as expected, np.load(joined) as found:
            assert list(found) == list(expected)
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])
    else:
        assert joined.read_bytes() == one.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([one.name, joined.name])


def test_what_is_not_of_one_prediction_is_not_joined(tmp_path):
    rows = np.zeros((_RECORDS, 5), np.float32)
    path = tmp_path / "all.npy"
    with pytest.raises(OptionError, match="must be there to be merged"):
        merge(path)
    _write_parts(path, rows, 3, data="other")
    with pytest.raises(DataError, match="of the same records, but found others in part 2"):
        merge(path)
    _write_parts(path, rows, 3, trained_on="other", function="other")
    with pytest.raises(DataError, match="same function of the model, shards of the training, but"):
        merge(path)
    _write_parts(path, rows, 3)
    _write(Part(3, 3).path_of(path), rows)
    with pytest.raises(DataError, match="1 of 3 missing or not as written: 3"):
        merge(path)
    _write_parts(path, rows, 3)
    note = tmp_path / "all.part-2-of-3.npy.json"
    told = json.loads(note.read_text())
    note.write_text(json.dumps({**told, "start": told["start"] - 1}))
    with pytest.raises(DataError, match="must be in one part"):
        merge(path)
    _write_parts(path, rows, 3)
    _write_parts(path, rows, 2)
    with pytest.raises(DataError, match="parts of 2 and parts of 3"):
        merge(path)
    assert not path.exists()
    for others in ({"parts": 0}, {"command": [1]}, {"of": "23"}, {"more": 1}):
        note.write_text(json.dumps({**told, **others}))
        with pytest.raises(DataError, match="must be as `tfdist predict --part` wrote it"):
            merge(path)


def test_digests_tell_what_numbers_come_from(folder, tmp_path):
    """What is no photo has no part in them, such as the files of other parts."""
    photos, program = tmp_path / "photos", tmp_path / "model.py"
    shutil.copytree(folder / "photos", photos)
    program.write_text(_MODEL)
    model, training = f"{program}:of_photos", str(folder / "of_photos")
    weights = folder / "of_photos.keras"
    first = digests_of(model, weights, str(photos), training)
    (photos / ".DS_Store").write_text("x")
    (photos / "all.part-1-of-2.csv").write_text("x")
    assert digests_of(model, weights, str(photos), training) == first
    Image.new("RGB", (5, 5)).save(photos / "new.png")
    program.write_text(f"{_MODEL}# other")
    others = digests_of(model, weights, str(photos), str(folder / "data"))
    assert {name for name in first if others[name] != first[name]} == set(first) - {"model"}
    assert (
        digests_of(f"{program}:model_fn", weights, str(photos), None)["function"]
        != first["function"]
    )


def test_the_command_of_a_part_says_where_it_ran():
    options = {"precision": "mixed_float16", "device_speeds": [1, 2]}
    where = Where(strategy="horovod", options=options, hosts="a:1,b:1", stall_timeout_s=9.0)
    assert where.asked == {
        "strategy": "horovod",
        "hosts": "a:1,b:1",
        "stall-timeout": 9.0,
        "option": ["precision=mixed_float16", "device_speeds=[1, 2]"],
    }
    assert Where().asked == {}


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/", "-1/2", "1/2/3", "x"])
def test_no_part(text):
    with pytest.raises(OptionError, match="--part must be the number"):
        Part.of(text)


def test_parts_are_even():
    for count in (7, 8, 1000):
        ranges = [part.range_of(count) for part in Part(1, 7).others]
        assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
        assert (ranges[0][0], ranges[-1][1]) == (0, count)
        assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1
