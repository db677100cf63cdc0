"""Checkpoints of a fit in a bucket: real requests to an S3 server on this machine."""

from __future__ import annotations

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.errors import CheckpointError, InUseError, OptionError, WriteError
from tfdist.records.buckets import cache, mirror
from tfdist.records.buckets.store import Store

pytestmark = pytest.mark.timeout(120)
URL = "s3://bucket/kept"
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype(np.float32), RNG.integers(0, 2, 24)


@pytest.fixture(autouse=True)
def place(emptied_bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_BETWEEN_TRIES_S", 0.01)
    return tmp_path / "cache"


class Stop(keras.callbacks.Callback):
    """Ends a fit as a lost machine would: by an error in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 9:
            raise RuntimeError("lost")


def fit(keep, *callbacks, epochs=3):
    with tfdist.strategy("single") as strategy:
        keras.utils.set_random_seed(0)

        def model_fn():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
            return model

        model = strategy.build(model_fn)
        data = strategy.dataset((X, Y), global_batch_size=4)
        callbacks = [*callbacks, *([keep] if keep else [])]
        model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)
        return model.get_weights()


def there() -> list[str]:
    return sorted(Store(URL).sizes())


def test_a_fit_goes_on_from_the_bucket_alone(place):
    Store(URL).write("notes.txt", b"mine")
    with pytest.raises(RuntimeError, match="lost"):
        fit(tfdist.Checkpoints(URL, every_steps=2, keep=2), Stop())
    data = "data-00000-of-00001"
    names = [f"ckpt-{n}.{part}" for n in (6, 8) for part in (data, "index")]
    assert there() == ["checkpoint", *names, "notes.txt"]

    with pytest.raises(CheckpointError, match=f"a folder without checkpoints, but found {URL}"):
        fit(tfdist.Checkpoints(URL))

    keep = tfdist.Checkpoints(URL, keep=2, resume=True)
    found = fit(keep)
    assert (keep.start.position.epoch, keep.start.position.step) == (1, 2)
    for ours, theirs in zip(found, fit(None), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert Store(URL).read("notes.txt") == b"mine"
    assert [name for name in there() if name.endswith(".index")] == [
        "ckpt-12.index",
        "ckpt-18.index",
    ]


def test_what_cannot_be_taken_there_is_kept(place, monkeypatch, capsys):
    def refuse(self, path, name):
        raise OSError("no way there")

    keep = tfdist.Checkpoints(URL, resume=True)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", refuse)
        with pytest.raises(WriteError, match=f"{URL} must hold all .* of the fit.*no way there"):
            fit(keep, epochs=2)
    told = capsys.readouterr().out
    assert told.count("the fit goes on, and its checkpoints are kept in") == 1
    assert "no way there" in told
    assert (keep.directory / "ckpt-12.index").is_file()
    keep._bucket._remove()
    assert (keep.directory / "ckpt-12.index").is_file(), "the only copy stays"
    half = "ckpt-3.data-00000-of-00001"  # Of a fit that was killed while it sent that.
    Store(URL).write(half, b"half")
    fit(keep, epochs=3)
    assert keep.start.position.epoch == 2, "what had been left was taken there, and gone on from"
    assert "ckpt-18.index" in there()
    assert half not in there()


def test_one_fit_at_a_time_writes_there():
    class FitAnother(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            fit(tfdist.Checkpoints(URL, resume=True), epochs=1)

    with pytest.raises(InUseError):
        fit(tfdist.Checkpoints(URL), FitAnother(), epochs=1)


def test_other_urls_are_refused():
    with pytest.raises(OptionError, match="must be a folder, or a URL that begins with s3://"):
        tfdist.Checkpoints("https://example.org/kept")
