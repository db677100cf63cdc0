"""Clients: whatever they come from, each one's own records, and bad ones told apart."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.errors import CorruptShardError, DataError, OptionError
from tfdist.records import check, open_clients, open_records, write


def arrays(num_records=120, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_records, 4, 4, 1), np.uint8), np.arange(num_records) % 5


def numbered(num_records=120):
    """Records of which each is its own number."""
    return np.arange(num_records, dtype=np.float32)[:, None], np.arange(num_records) % 5


def all_of(clients):
    return {client: clients.load(client) for client in clients.ids}


def everything(clients):
    return np.sort(np.concatenate([x[:, 0] for x, *_ in all_of(clients).values()]))


@pytest.fixture
def folder(tmp_path):
    write(numbered(), tmp_path / "fed", clients=6, partition="dirichlet:0.3")
    return tmp_path / "fed"


@pytest.fixture
def client_sets(tmp_path):
    for number, name in enumerate(("bob", "amy", "eve")):
        write(arrays(20, number), tmp_path / "sets" / name, num_shards=2, split="train=4,test=1")
    return tmp_path / "sets"


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_shards_hold_what_arrays_would(tmp_path, compression):
    options = {"clients": 6, "partition": "dirichlet:0.3"}
    write(numbered(), tmp_path / "fed", split="train=1", compression=compression, **options)
    clients = open_clients(tmp_path / "fed")
    assert clients.ids == tuple(f"client-{number}" for number in range(6))
    assert (len(clients), clients.partition) == (6, "dirichlet:0.3")
    assert np.array_equal(everything(clients), np.arange(120))
    for client, (x, y) in all_of(clients).items():
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        assert np.array_equal(x[:, 0] % 5, y)
        assert clients.num_records(client) == len(x)
        assert clients.label_counts(client) == {n: list(y).count(n) for n in sorted(set(y))}
    assert clients.element_spec == (tf.TensorSpec((1,), tf.float32), tf.TensorSpec((), tf.int64))


def test_one_shard_for_each_client_that_all_together_are_a_split(folder):
    clients = open_clients(folder / "train")
    records = open_records(folder / "train")
    (x, _), *more = records.batches(0, 100, 1000, shuffle=False, seed=0, epoch=0)
    assert not more
    in_order = np.concatenate([x for x, _ in all_of(clients).values()])
    assert np.array_equal(x.numpy(), in_order)
    assert open_records(folder / "validation").num_records == 20
    with pytest.raises(DataError, match="Choose one of"):
        open_clients(folder)


def test_arrays_and_a_folder_are_dealt(tmp_path):
    options = {"clients": 6, "partition": "shards:2", "seed": 3}
    write(numbered(), tmp_path / "plain", split="train=1")
    for source in (numbered(), tmp_path / "plain", tf.data.Dataset.from_tensor_slices(numbered())):
        clients = open_clients(source, **options)
        assert len(clients) == 6
        assert np.array_equal(everything(clients), np.arange(120))
        again = all_of(open_clients(source, **options))
        for client, (x, y) in all_of(clients).items():
            assert len(clients.label_counts(client)) <= 3
            assert np.array_equal(x, again[client][0])
            assert np.array_equal(x[:, 0] % 5, y)
    other = all_of(open_clients(numbered(), clients=6, partition="shards:2", seed=4))
    assert not np.array_equal(other["client-0"][0], again["client-0"][0])


def test_a_client_for_each_value_of_a_column(tmp_path):
    x, y = numbered(12)
    user = np.array(["amy", "bob", "eve"] * 4)
    source = ({"x": x, "user": user}, y)
    clients = open_clients(source, partition="by:user")
    assert clients.ids == ("amy", "bob", "eve")
    assert sorted(clients.load("bob")[0][:, 0]) == [1, 4, 7, 10]
    by_label = open_clients((x, y), partition="by:label")
    assert by_label.ids == ("0", "1", "2", "3", "4")
    assert set(by_label.load("3")[1]) == {3}
    with pytest.raises(DataError, match="Choose one of label"):
        open_clients((x, y), partition="by:user")
    write(
        ({"x": x, "id": np.arange(12) % 2}, y), tmp_path / "written", split="train=1", num_shards=1
    )
    from_shards = open_clients(tmp_path / "written", partition="by:id")
    assert sorted(from_shards.load("1")[0][:, 0]) == [1, 3, 5, 7, 9, 11]


def test_a_column_of_a_csv_has_no_name_in_shards(tmp_path):
    (tmp_path / "t.csv").write_text("a,place,y\n" + "1,2,0\n3,4,1\n" * 5)
    write(tmp_path / "t.csv", tmp_path / "plain", split="train=1")
    with pytest.raises(DataError, match=r"Write them anew.*--partition by:place"):
        open_clients(tmp_path / "plain", partition="by:place")
    assert open_clients(tmp_path / "plain", partition="by:label").ids == ("0", "1")


def test_a_dataset_with_a_column_of_text():
    x, y = numbered(12)
    users = np.array(["amy", "bob", "eve"] * 4)
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x, "user": users}, y))
    clients = open_clients(dataset, partition="by:user")
    assert clients.ids == ("amy", "bob", "eve")
    assert sorted(clients.load("eve")[0][:, 0]) == [2, 5, 8, 11]


def test_a_damaged_shard_is_named_when_records_are_dealt(tmp_path):
    write(numbered(), tmp_path / "plain", split="train=1")
    shard = tmp_path / "plain" / "train-00002-of-00004.tfrecord"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(CorruptShardError, match=r"train-00002-of-00004\.tfrecord, record 0"):
        open_clients(tmp_path / "plain", clients=3)


def test_weights_dicts_and_map_fn():
    x, y = numbered(10)
    source = ({"a": x, "b": x * 2}, {"c": y}, np.arange(10, dtype=np.float32))

    def map_fn(x, y, weight):
        return {"sum": x["a"] + x["b"]}, y["c"], weight / 2

    clients = open_clients(source, clients=2, map_fn=map_fn)
    assert clients.has_weights
    assert clients.element_spec[0] == {"sum": tf.TensorSpec((1,), tf.float32)}
    for client in clients.ids:
        x, y, weight = clients.load(client)
        assert np.array_equal(x["sum"][:, 0] / 3, weight * 2)
        assert np.array_equal(weight * 2 % 5, y)


def test_images_have_no_common_layout(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).save(path)
    write(tmp_path / "photos", tmp_path / "fed", split="train=1", partition="by:label")
    clients = open_clients(tmp_path / "fed")
    assert clients.ids == clients.class_names == ("a", "b")
    for number, client in enumerate(clients.ids):
        x, y = clients.load(client)
        assert (x.shape, x.dtype, set(y)) == ((6, 4, 4, 3), np.uint8, {number})
    first = sorted(open_clients(tmp_path / "fed").load("a")[0].sum(axis=(1, 2, 3)))
    files = sorted((tmp_path / "photos" / "a").iterdir())
    assert first == sorted(np.asarray(Image.open(path)).sum() for path in files)


def test_a_folder_of_shards_for_each_client(client_sets):
    clients = open_clients(client_sets / "train")
    assert clients.ids == ("amy", "bob", "eve")
    for number, name in ((1, "amy"), (0, "bob"), (2, "eve")):
        x, _ = clients.load(name)
        own = {image.tobytes() for image in arrays(20, number)[0]}
        assert {image.tobytes() for image in x} < own
        assert len(x) == clients.num_records(name) == sum(clients.label_counts(name).values()) == 16
    assert open_clients(str(client_sets / "test")).num_records("amy") == 4
    with pytest.raises(DataError, match=r"Choose one of .*train"):
        open_clients(client_sets)
    with pytest.raises(DataError, match=r"no folder .*trian"):
        open_clients(client_sets / "trian")
    assert check(client_sets) == []


def test_clients_whose_longest_records_differ(tmp_path):
    for name, longest in (("amy", 2), ("bob", 5)):
        tokens = [list(range(n % longest + 1)) for n in range(10)]
        write((tokens, np.arange(10) % 2), tmp_path / name, split="train=1", num_shards=1)
    clients = open_clients(tmp_path)
    assert clients.element_spec[0] == tf.TensorSpec((5,), tf.int64)
    for client, longest in (("amy", 2), ("bob", 5)):
        x, _ = clients.load(client)
        wanted = [[*range(n % longest + 1), 0, 0, 0, 0][:5] for n in range(10)]
        assert sorted(np.asarray(x).tolist()) == sorted(wanted)


def test_bad_folders_are_bad_clients_and_no_more(client_sets):
    (client_sets / "empty").mkdir()
    (client_sets / ".hidden").mkdir()
    write((np.zeros((8, 2, 2, 1), np.uint8), np.arange(8)), client_sets / "small", num_shards=1)
    shard = client_sets / "eve" / "train-00001-of-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    content[30] ^= 1
    shard.write_bytes(bytes(content))
    (client_sets / "bob" / "train-00000-of-00002.tfrecord").unlink()
    clients = open_clients(client_sets / "train")
    assert clients.ids == ("amy", "bob", "empty", "eve", "small")
    assert clients.num_records("empty") == 0
    assert len(clients.load("amy")[0]) == 16
    for client, error, message in (
        ("bob", CorruptShardError, "client 'bob'.*train-00000-of-00002.*missing"),
        ("empty", DataError, "client 'empty'.*manifest.json"),
        ("eve", CorruptShardError, "client 'eve'.*train-00001-of-00002.tfrecord, record 0, byte 0"),
        ("small", DataError, r"client 'small'.*'x' of uint8 \[2, 2, 1\], where others have"),
    ):
        with pytest.raises(error, match=message):
            clients.load(client)
    assert [fault.file for fault in check(client_sets)] == [
        "bob/train-00000-of-00002.tfrecord",
        "empty",
        "eve/train-00001-of-00002.tfrecord",
    ]
    skew = clients.describe()
    assert skew.num_records.tolist() == [16, 16, 0, 16, 0]
    assert "empty" in str(skew)


def test_bad_arrays_are_bad_clients_and_no_more():
    x, y = numbered(10)
    nan, huge = x.copy(), x.copy()
    nan[3, 0], huge[4, 0] = np.nan, np.inf
    source = {
        "good": (x, y),
        7: (x[:4], y[:4]),
        "nan": (nan, y),
        "inf": (huge, y),
        "none": (x[:0], y[:0]),
        "wide": (np.zeros((5, 2), np.float32), y[:5]),
        "uneven": (x, y[:9]),
        "weights": (x, y, np.ones(10)),
    }
    clients = open_clients(source)
    assert clients.ids == ("good", "7", "nan", "inf", "none", "wide", "uneven", "weights")
    assert len(clients.load("7")[0]) == 4
    for client, message in (
        ("nan", "client 'nan': all values must be finite, but found nan in x, record 3"),
        ("inf", "but found inf in x, record 4"),
        ("none", "at least one record"),
        ("wide", r"float32 \[2\].*where others have .*float32 \[1\]"),
        ("uneven", "same number of records"),
        ("weights", "same shapes"),
    ):
        with pytest.raises(DataError, match=message):
            clients.load(client)
    with pytest.raises(DataError, match="There are 8: good, 7, nan"):
        clients.load("gud")


@pytest.mark.filterwarnings("error")
def test_large_finite_values_are_finite():
    big = np.full((4, 1), 3e38, np.float32)
    assert len(open_clients({"a": (big, np.zeros(4))}).load("a")[0]) == 4


def test_a_map_fn_that_loses_rows_or_makes_nan():
    def drop(x, y):
        return tf.boolean_mask(x, x[:, 0] > 2), y

    clients = open_clients({"a": numbered(10)}, map_fn=drop)
    with pytest.raises(DataError, match="client 'a': map_fn must keep the number of rows"):
        clients.load("a")
    clients = open_clients({"a": numbered(10)}, map_fn=lambda x, y: (x / x, y))
    with pytest.raises(DataError, match="nan in x, record 0"):
        clients.load("a")


def test_options_that_cannot_hold(folder):
    with pytest.raises(OptionError, match="6 clients already"):
        open_clients(folder / "train", clients=6)
    with pytest.raises(OptionError, match="2 clients already"):
        open_clients({"a": numbered(3), "b": numbered(3)}, partition="shards:2")
    with pytest.raises(OptionError, match="must have a number of clients"):
        open_clients(folder / "validation")
    with pytest.raises(OptionError, match="partition must be a known one"):
        open_clients(numbered(), clients=3, partition="random")
    with pytest.raises(DataError, match="120 records for 121 clients"):
        open_clients(numbered(), clients=121)
    with pytest.raises(DataError, match="class ids"):
        open_clients((np.zeros(9), np.zeros(9)), clients=3, partition="dirichlet:1")
    with pytest.raises(DataError, match="no folder"):
        open_clients(folder.parent / "nowhere")
    with pytest.raises(DataError, match="at least one client"):
        open_clients({})


def test_many_clients_are_neither_kept_open_nor_in_memory(tmp_path):
    import os
    import tracemalloc
    import weakref

    images = np.zeros((2000, 64, 64, 1), np.uint8)
    write((images, np.arange(2000) % 10), tmp_path / "fed", split="train=1", clients=1000)
    clients = open_clients(tmp_path / "fed")
    clients.load(clients.ids[0])
    before = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    loaded = []
    for client in clients.ids:
        x, _ = clients.load(client)
        assert x.shape == (2, 64, 64, 1)
        loaded.append(weakref.ref(x))
    # What reading has brought: threads that other tests leave behind need memory, too.
    reading = tracemalloc.Filter(True, "*/tfdist/records/clients/*")
    held = tracemalloc.take_snapshot().filter_traces([reading])
    tracemalloc.stop()
    # All clients together are 8 MB.
    assert sum(trace.size for trace in held.traces) < 1e6
    assert sum(array() is not None for array in loaded) == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_record_is_changed_by_itself_and_anew_in_each_epoch(folder):
    def noisy(x, y, seed):
        return x + tf.random.stateless_uniform([1], seed), tf.cast(y, tf.float32)

    plain = all_of(open_clients(folder / "train"))
    clients = open_clients(folder / "train", record_fn=noisy, seed=3)
    assert clients.element_spec[1].dtype == tf.float32
    added = {
        epoch: np.concatenate(
            [clients.load(client, epoch=epoch)[0] - plain[client][0] for client in clients.ids]
        )
        for epoch in (0, 1)
    }
    for noise in added.values():
        assert 0 <= noise.min() < 0.2 < 0.8 < noise.max() < 1.001
        assert len(np.unique(noise.round(3))) > len(noise) * 0.8  # No client as another.
    assert np.abs(added[0] - added[1]).mean() > 0.2
    again = open_clients(folder / "train", record_fn=noisy, seed=3).load(clients.ids[2], epoch=1)
    np.testing.assert_array_equal(again[0], clients.load(clients.ids[2], epoch=1)[0])


def test_a_client_is_changed_by_both_functions_in_turn(folder):
    clients = open_clients(
        folder / "train",
        record_fn=lambda x, y: ({"a": x, "b": x * 2}, y),
        map_fn=lambda x, y: (x["b"] + tf.reduce_sum(x["a"] * 0), y),
    )
    plain = open_clients(folder / "train").load(clients.ids[0])[0]
    np.testing.assert_array_equal(clients.load(clients.ids[0])[0], plain * 2)
    with pytest.raises(DataError, match="record_fn"):
        open_clients(folder / "train", record_fn=lambda x, y: x)


def test_texts_and_lists_are_dealt_to_clients(tmp_path):
    texts = np.array([f"word {n}" for n in range(24)], object)
    tokens = [list(range(1 + n % 4)) for n in range(24)]
    source = ({"text": texts, "tokens": tokens}, np.arange(24) % 2)
    write(source, tmp_path / "fed", split="train=1", clients=3)
    write(source, tmp_path / "whole", split="train=1", num_shards=1)
    for clients in (
        open_clients(tmp_path / "fed/train"),
        open_clients(tmp_path / "whole/train", clients=3),
    ):
        loaded = [x for x, _ in all_of(clients).values()]
        assert sorted(b for x in loaded for b in x["text"]) == sorted(t.encode() for t in texts)
        assert {x["tokens"].shape for x in loaded} == {(8, 4)}
