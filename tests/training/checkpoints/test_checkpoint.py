"""Checkpoints: what they hold, what they refuse, and that a killed fit goes on exactly."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

from tfdist.errors import CheckpointError, InUseError, OptionError, WriteError
from tfdist.records import write
from tfdist.strategies import strategy
from tfdist.strategies.single import Alone
from tfdist.training.checkpoints import callback_state, checkpoint, checkpoint_files
from tfdist.training.checkpoints.checkpoint import Checkpoints
from tfdist.training.checkpoints.checkpoint_files import LOCK
from tfdist.training.checkpoints.checkpoint_state import (
    ORDER,
    CheckpointState,
    DataState,
    Position,
    Start,
)
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.folder_lock import FolderLock

keras = tf.keras
_RNG = np.random.default_rng(0)
X, Y = _RNG.normal(size=(21, 4)).astype(np.float32), _RNG.integers(0, 2, 21)
STEPS = 6  # of 4 rows, the last of 1


class Break(keras.callbacks.Callback):
    """Ends the fit with an error after a step of the second epoch."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._epoch == 1 and batch + 1 >= self._step:
            raise KeyboardInterrupt


def new_model(width=3, **compile_options):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(2, "softmax")]
    )
    options = {"optimizer": "adam", "metrics": ["accuracy"]} | compile_options
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model


def fit(*callbacks, model=None, rows=21, batch=4, seed=0, epochs=3, **options):
    alone = strategy("single")
    built = alone.build(lambda: model or new_model())
    feed = alone.dataset((X[:rows], Y[:rows]), global_batch_size=batch, seed=seed)
    history = built.fit(feed, epochs=epochs, callbacks=list(callbacks), verbose=0, **options)
    return built, history


def broken_fit(folder, step=5, every_steps=2, model=None, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(folder, every_steps=every_steps, **options), Break(step), model=model)


@pytest.fixture(scope="module")
def unbroken():
    """The model of a fit that nothing happened to."""
    return fit()[0]


@pytest.fixture(scope="module")
def once_broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    broken_fit(folder)
    return folder


@pytest.fixture
def broken(once_broken, tmp_path):
    """A folder of checkpoints of a fit that was broken off."""
    return shutil.copytree(once_broken, tmp_path / "broken")


def numbers(folder):
    """Returns the numbers of the checkpoints: steps since the start."""
    return sorted(
        int(re.search(r"ckpt-(\d+)\.index", path.name).group(1)) for path in folder.glob("*.index")
    )


def assert_same(model, other):
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_resuming_within_an_epoch_equals_the_unbroken_fit(broken):
    assert numbers(broken) == [STEPS, STEPS + 2, STEPS + 4]
    held_out = (X[:5], Y[:5])
    resumed, history = fit(Checkpoints(broken, resume=True), validation_data=held_out)
    unbroken, expected = fit(validation_data=held_out)
    assert_same(resumed, unbroken)
    assert history.epoch == [1, 2]
    for name, values in history.history.items():
        np.testing.assert_allclose(values, expected.history[name][1:], atol=1e-6, err_msg=name)


def test_what_draws_other_numbers_in_a_resumed_fit_is_told(broken, tmp_path, capsys):
    def noisy():
        keras.utils.set_random_seed(5)
        parts = [keras.layers.Dropout(0.5, name="drop"), keras.layers.GaussianNoise(0.1, name="n")]
        model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(2, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    broken_fit(tmp_path / "noisy", model=noisy())
    fit(Checkpoints(broken, resume=True))
    assert "no checkpoint holds" not in capsys.readouterr().out
    fit(Checkpoints(tmp_path / "noisy", resume=True), model=noisy())
    told = "tfdist: layer 'drop', layer 'n' draws random numbers that no checkpoint holds"
    assert capsys.readouterr().out.count(told) == 1


def test_an_evaluation_in_or_after_a_resumed_epoch_counts_its_own_rows_alone(broken):
    found = []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(evaluated(self.model))

    def evaluated(model):
        fresh = new_model()
        fresh.set_weights(model.get_weights())
        alone = strategy("single")
        feed = alone.dataset((X, 1 - Y), global_batch_size=4, training=False)
        expected = fresh.evaluate(X, 1 - Y, batch_size=4, verbose=0)
        ways = [
            model.evaluate(X, 1 - Y, batch_size=4, verbose=0),
            model.evaluate(feed, verbose=0),
            model.test_on_batch(X, 1 - Y),
        ]
        return ways, [pytest.approx(expected, abs=1e-6)] * len(ways)

    model = strategy("single").build(new_model)
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(broken, resume=True), Break(1), model=model)
    found.append(evaluated(model))
    fit(Evaluate(), Checkpoints(broken, resume=True), epochs=2)
    assert len(found) == 2
    for ways, expected in found:
        assert ways == expected


@pytest.mark.parametrize("metrics", [[], ["accuracy", "mse"]], ids=str)
def test_an_epoch_goes_on_with_the_metrics_it_began_with(broken, metrics):
    with pytest.raises(CheckpointError, match=r"some that keep .* numbers, where they were 4"):
        fit(Checkpoints(broken, resume=True), model=new_model(metrics=metrics))
    assert numbers(broken) == [STEPS, STEPS + 2, STEPS + 4]


def test_the_numbers_of_checkpoints_grow_when_a_batch_of_another_size_goes_on(tmp_path):
    epochs, newest = [], []
    for batch, last in ((4, 3), (8, 4), (4, 5)):
        keeper = Checkpoints(tmp_path, resume=True)
        epochs.append(fit(keeper, batch=batch, epochs=last)[1].epoch)
        newest.append(numbers(tmp_path)[-1])
        assert keeper.newest.name == f"ckpt-{newest[-1]}"
    assert epochs == [[0, 1, 2], [3], [4]]
    assert newest == [18, 21, 27]


@pytest.mark.long
def test_resuming_within_an_epoch_of_batches_of_similar_lengths(tmp_path):
    tokens = [_RNG.integers(1, 9, length) for length in _RNG.integers(1, 20, 22)]
    write((tokens, _RNG.integers(0, 2, 22)), tmp_path / "data", split="train=1", num_shards=2)

    def train(*callbacks, pad_to="batch"):
        keras.utils.set_random_seed(5)
        alone = strategy("single")
        model = keras.Sequential([
            keras.Input((None,)), keras.layers.Embedding(9, 3),
            keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2, "softmax"),
        ])  # fmt: skip
        model.compile("adam", "sparse_categorical_crossentropy")
        feed = alone.dataset(
            tmp_path / "data", global_batch_size=4, pad_to=pad_to, bucket_by_length=True
        )
        built = alone.build(model)
        built.fit(feed, epochs=3, callbacks=list(callbacks), verbose=0)
        return built

    with pytest.raises(KeyboardInterrupt):
        train(Checkpoints(tmp_path / "kept", every_steps=2), Break(3))
    with pytest.raises(CheckpointError, match="pad_to and bucket_by_length"):
        train(Checkpoints(tmp_path / "kept", resume=True), pad_to=4)
    assert_same(train(Checkpoints(tmp_path / "kept", resume=True)), train())


def test_checkpoints_from_before_there_was_padding_are_read():
    data = DataState(seed=1, num_records=9, global_batch_size=4, steps_per_epoch=3, parts=2)
    state = CheckpointState(data)
    state._data.assign([1, 9, 4, 3, 2])
    state._position.assign([1, 2])
    assert state.start(data, "ckpt-5").parts == 2


@pytest.mark.parametrize(
    ("step", "parts", "is_refused"), [(2, 2, True), (0, 2, False), (2, 1, False)]
)
def test_an_epoch_of_several_processes_keeps_its_order(step, parts, is_refused):
    data = DataState(
        seed=1, num_records=9, global_batch_size=4, steps_per_epoch=3, parts=2, order=ORDER
    )
    state = CheckpointState(data)
    state._data.assign([1, 9, 4, 3, parts, 0])
    state._position.assign([1, step])
    if not is_refused:
        assert state.start(data, "ckpt-5").position.epoch == 1
        return
    with pytest.raises(CheckpointError, match="ckpt-5, of a version of tfdist that shuffles"):
        state.start(data, "ckpt-5")


@pytest.mark.long
def test_checkpoints_keep_a_vocabulary_and_those_from_before_are_read(tmp_path, monkeypatch):
    def train(folder, words, epochs=1, **options):
        names = keras.layers.StringLookup()
        names.adapt(words)
        inputs = keras.Input((1,), dtype="string")
        outputs = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(names(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        alone = strategy("single")
        feed = alone.dataset((np.array([["a"], ["b"]]), np.ones((2, 2))), global_batch_size=2)
        built = alone.build(lambda: model)
        keep = Checkpoints(tmp_path / folder, **options)
        built.fit(feed, epochs=epochs, callbacks=[keep], verbose=0)
        return names.get_vocabulary()[1:]

    assert train("new", ["a", "b", "b"]) == ["b", "a"]
    assert train("new", ["a", "a", "b"], resume=True) == ["b", "a"]
    with monkeypatch.context() as before:
        before.setattr(checkpoint, "learned_words", lambda model: [])
        train("old", ["a", "b", "b"])
    assert train("old", ["a", "b", "b"], epochs=2, resume=True) == ["b", "a"]


def test_the_last_ones_are_kept(tmp_path):
    fit(Checkpoints(tmp_path, every_steps=1, keep=2))
    assert numbers(tmp_path) == [3 * STEPS - 1, 3 * STEPS]


@pytest.mark.parametrize(
    ("keep", "left"), [(1, ["9"]), (2, ["8", "9"]), (4, ["7", "8", "9", "10"])]
)
def test_the_one_just_written_is_kept_whatever_is_newer(tmp_path, keep, left):
    """As after a damaged one, from which no fit could go on."""
    for number in (7, 8, 9, 10):
        for end in ("index", "data-00000-of-00001"):
            (tmp_path / f"ckpt-{number}.{end}").write_bytes(b"")
    os.utime(tmp_path / "ckpt-8.index", (2e9, 2e9))  # By a clock that is ahead.
    checkpoint_files.keep_last(tmp_path, "ckpt-9", keep)
    parts = {f"ckpt-{n}.{end}" for n in left for end in ("index", "data-00000-of-00001")}
    assert {path.name for path in tmp_path.iterdir()} == {*parts, "checkpoint"}
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-9")


def test_steps_that_run_together_pass_over_none(tmp_path):
    fit(
        Checkpoints(tmp_path, every_steps=3, keep=9),
        model=new_model(steps_per_execution=4),
        epochs=1,
    )
    assert numbers(tmp_path) == [4, 6]


def test_a_finished_fit_has_nothing_to_do(tmp_path):
    model, _ = fit(Checkpoints(tmp_path))
    again, history = fit(Checkpoints(tmp_path, resume=True))
    assert history.history == {}
    assert_same(again, model)


def test_resuming_from_an_empty_folder_starts(tmp_path):
    _, history = fit(Checkpoints(tmp_path / "new", resume=True), epochs=1)
    assert history.epoch == [0]


def test_a_new_fit_refuses_a_used_folder(broken):
    before = sorted(path.name for path in broken.iterdir())
    with pytest.raises(CheckpointError, match="resume=True"):
        fit(Checkpoints(broken))
    assert sorted(path.name for path in broken.iterdir()) == before


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch": 5}, {"rows": 20}, {"batch": 8}], ids=str)
def test_other_data_is_refused(broken, other):
    with pytest.raises(CheckpointError, match="same records, seed, global_batch_size, pad_to and"):
        fit(Checkpoints(broken, resume=True), **other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: new_model(width=7),
        lambda: new_model(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)),
        lambda: keras.Sequential(
            [*new_model().layers, keras.layers.Dense(2, "softmax")], name="deeper"
        ),
    ],
    ids=["other width", "other optimizer", "another layer"],
)
def test_another_model_is_refused(broken, make):
    model = make()
    if not model.optimizer:
        model.build((None, 4))
        model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(CheckpointError, match="by the model that wrote it"):
        fit(Checkpoints(broken, resume=True), model=model)


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("bytes_left", [0, 100])
def test_a_damaged_newest_falls_back_to_the_one_before(
    broken, unbroken, capsys, suffix, bytes_left
):
    newest = broken / f"ckpt-{STEPS + 4}{suffix}"
    newest.write_bytes(newest.read_bytes()[:bytes_left])
    resumed, _ = fit(Checkpoints(broken, resume=True))
    assert f"ckpt-{STEPS + 4} is damaged" in capsys.readouterr().out
    assert_same(resumed, unbroken)


def test_only_damaged_ones_are_an_error(broken):
    for path in broken.glob("*.index"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="only damaged ones, ckpt-10, ckpt-8, ckpt-6"):
        fit(Checkpoints(broken, resume=True))
    elsewhere = Checkpoints(broken, resume=True)
    elsewhere.call("s3://bucket/run/checkpoints")
    with pytest.raises(CheckpointError, match="Remove s3://bucket/run/checkpoints and train"):
        fit(elsewhere)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1"),
        ({"every_steps": 2.5}, "every_steps must be a whole number"),
        ({"keep": 0}, "keep must be a whole number of at least 1"),
        ({"keep": "3"}, "keep must be a whole number"),
        ({"resume": "no"}, "resume must be True or False"),
        ({"directory": None}, "directory must be a path"),
    ],
)
def test_options(options, rule):
    with pytest.raises(OptionError, match=rule):
        Checkpoints(**({"directory": "folder"} | options))


@pytest.mark.parametrize("name", ["m[1]", "m*", "m?", "m\\1"])
def test_a_path_that_is_a_pattern_is_refused(tmp_path, name):
    """TensorFlow would remove the files of m1 where it has written new ones in m[1]."""
    with pytest.raises(OptionError, match="must have none of the characters"):
        Checkpoints(tmp_path / name / "kept")
    assert list(tmp_path.iterdir()) == []


def test_a_fit_has_one_of_them(tmp_path):
    with pytest.raises(OptionError, match=r"one callback Checkpoints.*one and .*two"):
        fit(Checkpoints(tmp_path / "one"), Checkpoints(tmp_path / "two"))
    assert not list(tmp_path.iterdir())


def restored(folder):
    """Returns where a fit would go on, and with which weights."""
    data = DataState(seed=0, num_records=21, global_batch_size=4, steps_per_epoch=STEPS, parts=1)
    model = new_model()
    model.optimizer.build(model.trainable_variables)
    keeper = Checkpoints(folder, resume=True)
    start = keeper.bind(Binding(model, Alone()), data)
    keeper.release()
    optimizer = [variable.numpy() for variable in model.optimizer.variables]
    return start.position, [*model.get_weights(), *optimizer]


def test_a_damaged_byte_is_found_wherever_it_is(broken):
    newest, weights = restored(broken)
    before = Position(1, newest.step - 2)
    rng = np.random.default_rng(0)
    found = []
    for suffix in (".index", ".data-00000-of-00001"):
        path = broken / f"ckpt-{STEPS + 4}{suffix}"
        sound = path.read_bytes()
        for place in rng.integers(0, len(sound), 20):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            position, own = restored(broken)
            found.append(position)
            if position == newest:  # It was a byte that nothing reads.
                for mine, expected in zip(own, weights, strict=True):
                    np.testing.assert_array_equal(mine, expected)
        path.write_bytes(sound)
    assert set(found) <= {before, newest}
    assert found.count(before) > 30


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", None], ids=["empty", "no text", "gone"])
def test_without_their_list_checkpoints_are_found_by_their_names(broken, content):
    newest = restored(broken)[0]
    listed = broken / "checkpoint"
    if content is None:
        listed.unlink()
    else:
        listed.write_bytes(content)
    assert restored(broken)[0] == newest
    with pytest.raises(CheckpointError, match="resume=True"):
        fit(Checkpoints(broken))


def test_a_list_that_was_cut_short_hides_none(broken):
    newest = restored(broken)[0]
    listed = broken / "checkpoint"
    lines = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(lines[:2]))  # The newest, and of all the oldest.
    assert restored(broken)[0] == newest


@pytest.mark.parametrize(
    "listed",
    [
        'model_checkpoint_path: "ckpt-99"\nall_model_checkpoint_paths: "ckpt-99"\n',
        'model_checkpoint_path: "../mine/ckpt-1"\nall_model_checkpoint_paths: "../mine/ckpt-1"\n'
        "all_model_checkpoint_timestamps: 1.0\nlast_preserved_timestamp: 1.0\n",
        'model_checkpoint_path: "ckpt-6"\nall_model_checkpoint_paths: "ckpt-6"\n'
        "all_model_checkpoint_timestamps: 1.0\nlast_preserved_timestamp: 1.0\n",
    ],
    ids=["of none that is there", "of another folder", "of the oldest alone"],
)
def test_a_wrong_list_hides_none_and_removes_none(broken, unbroken, listed):
    newest = restored(broken)[0]
    theirs = broken.parent / "mine" / "ckpt-1.index"
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    (broken / "checkpoint").write_text(listed)
    assert restored(broken)[0] == newest
    assert f"ckpt-{STEPS + 4}" in (broken / "checkpoint").read_text()
    resumed, _ = fit(Checkpoints(broken, resume=True, keep=2))
    assert_same(resumed, unbroken)
    assert numbers(broken) == [2 * STEPS, 3 * STEPS]  # The others had their turn.
    assert theirs.read_text() == "theirs"


def test_two_fits_do_not_write_in_one_folder(broken, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PATIENCE_S", 0.2)
    holder = FolderLock(broken / LOCK)
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    with pytest.raises(InUseError, match=rf"process {os.getpid()} on \S+ since 2"):
        fit(Checkpoints(broken, resume=True))
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before
    holder.release()
    fit(Checkpoints(broken, resume=True))
    fit(Checkpoints(broken, resume=True))  # The one before let go.


def test_what_a_dead_writer_left_is_removed_and_nothing_else(broken):
    whole = {path.name for path in broken.iterdir()}
    (broken / "ckpt-11_temp").mkdir()
    (broken / "ckpt-11_temp" / "part-00000-of-00001.index").write_bytes(b"half")
    (broken / "ckpt-11.data-00000-of-00001").write_bytes(b"half")
    (broken / "checkpoint.tmp0123456789abcdef").write_bytes(b"half")
    (broken / "notes.txt").write_text("the user's")
    restored(broken)
    assert {path.name for path in broken.iterdir()} == {*whole, "notes.txt"}


@pytest.mark.parametrize("limit", [1, 1000])
def test_a_full_disk_leaves_the_checkpoints_before_it(broken, limit, unbroken):
    def files():
        return {p.name: p.read_bytes() for p in broken.iterdir() if p.name != LOCK}

    whole = files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            WriteError, match=r"ckpt-12 must be written whole, but found File too large\."
        ):
            fit(Checkpoints(broken, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files() == whole
    resumed, _ = fit(Checkpoints(broken, resume=True))
    assert_same(resumed, unbroken)


def test_a_killed_script_goes_on_to_the_same_weights(tmp_path):
    """Under tfdist launch; tests/faults has what tfdist train makes of it, on every strategy."""
    launch = ("-m", "tfdist", "launch", "--strategy", "horovod", "--workers", "2", "--")
    script = (sys.executable, str(Path(__file__).with_name("killed_fit.py")))
    options = json.dumps({"stall_timeout_s": 100})

    def run(mode):
        return subprocess.run(
            [sys.executable, *launch, *script, "horovod", options, str(tmp_path), mode],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
        )

    killed = run("kill")
    assert killed.returncode in (-9, 137), killed.stderr[-2000:]
    # Seven steps an epoch; killed after the fifth of the second, or before its checkpoint ended.
    assert numbers(tmp_path / "checkpoints")[-1] in (9, 11)
    resumed = run("resume")
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["epochs"] == [1, 2]
    assert found["weights"] <= 1e-6
    assert found["history"] <= 1e-5


class Interrupt(keras.callbacks.Callback):
    """Ends the fit with an error within an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise KeyboardInterrupt


def deciding(folder):
    """Returns callbacks that decide by what they have seen; their file tells what the last did."""
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=0.1),
        keras.callbacks.EarlyStopping(
            "loss", patience=5, min_delta=0.1, restore_best_weights=True, mode="min"
        ),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best.weights.h5"), "accuracy", save_best_only=True, save_weights_only=True
        ),
    ]


@pytest.mark.parametrize("epoch", [4, *long(1, 2, 5)])
def test_callbacks_that_decide_go_on_from_what_they_had_seen(tmp_path, epoch):
    unbroken, history = fit(*deciding(tmp_path), epochs=20)
    assert 5 < len(history.epoch) < 20  # It stops early, after some rates.
    assert len(set(history.history["learning_rate"])) > 1
    kept = tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(kept), *deciding(tmp_path), Interrupt(epoch), epochs=20)
    resumed, rest = fit(Checkpoints(kept, resume=True), *deciding(tmp_path), epochs=20)
    assert rest.epoch == history.epoch[epoch:]
    assert_same(resumed, unbroken)
    for name in ("learning_rate", "loss"):
        assert rest.history[name] == pytest.approx(history.history[name][epoch:], abs=1e-6)


class Slower(keras.callbacks.Callback):
    """Begins with a learning rate of its own, which it halves at each epoch's end."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate.assign(0.05)

    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(0.5 * tf.convert_to_tensor(rate))


@pytest.mark.parametrize("stops", [Interrupt(2), Break(4)], ids=["epoch", "step"])
def test_a_rate_that_a_callback_sets_when_a_fit_begins_is_not_set_again(tmp_path, stops):
    unbroken, _ = fit(Slower())
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(tmp_path, every_steps=1), Slower(), stops)
    resumed, _ = fit(Checkpoints(tmp_path, resume=True), Slower())
    assert_same(resumed, unbroken)


def test_a_schedule_that_a_callback_sets_when_a_fit_begins_holds(tmp_path):
    class Scheduled(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
            self.model.optimizer.learning_rate = schedule

    unbroken, _ = fit(Scheduled())
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(tmp_path, every_steps=1), Scheduled(), Break(4))
    resumed, _ = fit(Checkpoints(tmp_path, resume=True), Scheduled())
    assert_same(resumed, unbroken)


@pytest.mark.parametrize("stops_first", [True, False])
def test_an_epoch_that_a_callback_ended_goes_on(tmp_path, unbroken, stops_first):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 3

    def resumed(*others):
        callbacks = [Checkpoints(tmp_path, resume=True), *others]
        model = new_model(steps_per_execution=2)
        return fit(*(callbacks[::-1] if stops_first else callbacks), model=model)

    resumed(Stop())
    assert numbers(tmp_path) == [4]
    again, rest = resumed()
    assert rest.epoch == [0, 1, 2]
    assert_same(again, unbroken)


def test_a_training_that_was_stopped_early_stays_so(tmp_path, capsys):
    stopped, _ = fit(Checkpoints(tmp_path), *deciding(tmp_path), epochs=20)
    again, rest = fit(Checkpoints(tmp_path, resume=True), *deciding(tmp_path), epochs=20)
    assert rest.epoch == []
    assert "EarlyStopping ended this training" in capsys.readouterr().out
    assert_same(again, stopped)
    _, rest = fit(Checkpoints(tmp_path, resume=True), epochs=20)
    assert rest.epoch[-1] == 19


def test_the_best_weights_are_back_when_nothing_is_left_to_train(tmp_path):
    """EarlyStopping puts them back at the end of every fit."""
    ended, _ = fit(Checkpoints(tmp_path), *deciding(tmp_path), epochs=4)
    again, rest = fit(Checkpoints(tmp_path, resume=True), *deciding(tmp_path), epochs=4)
    assert rest.epoch == []
    assert_same(again, ended)


@pytest.mark.parametrize("is_earlier", [False, True])
def test_the_best_weights_may_have_words(tmp_path, monkeypatch, capsys, is_earlier):
    words = np.array(["a", "b", "ö", "d"] * 4)
    names = keras.layers.StringLookup()
    names.adapt(words)

    def train(epochs, **options):
        inputs = keras.Input((), dtype="string")
        hidden = keras.layers.Embedding(6, 2)(names(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        with strategy("single") as alone:
            model = alone.build(lambda: model)
            data = alone.dataset((words, np.ones(16, np.float32)), global_batch_size=4)
        best = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        keep = Checkpoints(tmp_path, **options)
        rest = model.fit(data, epochs=epochs, verbose=0, callbacks=[best, keep])
        return best.best_weights, rest.epoch

    with monkeypatch.context() as before:
        if is_earlier:
            before.setattr(callback_state, "_plain", lambda array: array)
        had, _ = train(2)
    best, epochs = train(2, resume=True)
    assert epochs == []
    assert ("begin anew" in capsys.readouterr().out) == is_earlier
    if not is_earlier:
        for one, other in zip(had, best, strict=True):
            np.testing.assert_array_equal(one, other)
    assert train(3, resume=True)[1] == [2]


def test_a_checkpoint_of_keras_own_counts_on_and_best_weights_keep_their_type():
    keras = tf.keras.callbacks
    saving, best = keras.ModelCheckpoint("a", save_freq=4), keras.EarlyStopping("loss")
    saving._batches_seen_since_last_saving = 2
    best.best_weights = [np.asarray(tf.constant([1.5, 2.0], tf.bfloat16)), np.float32([3])]
    again = keras.ModelCheckpoint("a", save_freq=4), keras.EarlyStopping("loss")
    callback_state.restore(again, callback_state.written([saving, best]))
    assert again[0]._batches_seen_since_last_saving == 2
    for one, other in zip(again[1].best_weights, ([1.5, 2], [3]), strict=True):
        assert one.tolist() == other


def test_a_second_break_in_an_epoch_remembers_who_began_it(tmp_path):
    keeper = Checkpoints(tmp_path)
    data = DataState(seed=0, num_records=21, global_batch_size=4, steps_per_epoch=STEPS, parts=1)
    model = new_model()
    model.optimizer.build(model.trainable_variables)
    keeper.bind(Binding(model, Alone()), data, begun_at=Start(Position(1, 2), parts=3))
    found = []
    for position in (Position(1, 4), Position(2, 2)):
        keeper._save(position, [])
        keeper.release()
        reader = Checkpoints(tmp_path, resume=True)
        found.append(reader.bind(Binding(model, Alone()), data).parts)
        reader.release()
    assert found == [3, 1]


def test_a_state_between_batches_is_not_lost_without_a_word(tmp_path):
    def model_fn():
        inputs = tf.keras.Input(batch_shape=(4, 3, 1))
        outputs = tf.keras.layers.Dense(1)(tf.keras.layers.LSTM(2, stateful=True)(inputs))
        model = tf.keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    with strategy("single") as alone:
        data = (np.zeros((8, 3, 1), np.float32), np.zeros((8, 1), np.float32))
        train = alone.dataset(data, global_batch_size=4)
        keep = Checkpoints(tmp_path / "kept")
        alone.build(model_fn).fit(train, epochs=1, verbose=0, callbacks=[keep])
        keep = Checkpoints(tmp_path / "kept", resume=True)
        with pytest.raises(CheckpointError, match=r"must not have stateful.*found layer 'lstm"):
            alone.build(model_fn).fit(train, epochs=2, verbose=0, callbacks=[keep])
