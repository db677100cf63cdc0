"""TextVectorization with the vocabulary of a split."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError, OptionError

TEXTS = ["the cat sat", "the dog sat", "The mouse, the cat!", "a bird"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "data"
    texts = [*TEXTS, "never seen in training"]
    path = out.with_suffix(".csv")
    path.write_text("text,n,label\n" + "".join(f'"{t}",{n},{n % 2}\n' for n, t in enumerate(texts)))
    # The last of this seed's order is in the split that is not read.
    for seed in range(50):
        target = out / str(seed)
        tfdist.records.write(
            path, target, text="text", split="train=4,test=1", num_shards=1, seed=seed
        )
        x, _ = next(iter(tfdist.records.read(target / "test", batch_size=1)))
        if x["text"].numpy()[0].startswith(b"never"):
            return target
    raise AssertionError


def by_hand(**options):
    layer = tf.keras.layers.TextVectorization(**options)
    layer.adapt(tf.constant(TEXTS))
    return layer


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 5, "output_sequence_length": 6}, {"standardize": None}]
)
def test_it_is_the_one_of_the_first_split_alone(folder, options):
    layer = tfdist.text_vectorizer(folder, **options)
    expected = by_hand(**options)
    assert layer.get_vocabulary() == expected.get_vocabulary()
    assert "never" not in layer.get_vocabulary()
    np.testing.assert_array_equal(layer(TEXTS), expected(TEXTS))


def test_other_data(folder):
    assert "never" in tfdist.text_vectorizer(folder / "test").get_vocabulary()
    of_arrays = tfdist.text_vectorizer((np.array(TEXTS), np.zeros(4)))
    assert of_arrays.get_vocabulary() == by_hand().get_vocabulary()
    two = {"a": np.array(TEXTS), "b": np.array(["x", "y", "z", "x"])}
    vocabulary = tfdist.text_vectorizer((two, np.zeros(4)), feature="b").get_vocabulary()
    assert vocabulary == ["", "[UNK]", "x", "z", "y"]


def test_in_map_fn(folder):
    vectorize = tfdist.text_vectorizer(folder, output_sequence_length=4)
    batches = tfdist.records.read(
        folder / "train", batch_size=3, map_fn=lambda x, y: (vectorize(x["text"]), y)
    )
    assert batches.element_spec[0].shape.as_list()[1:] == [4]
    ids = np.concatenate([x.numpy() for x, _ in batches])
    expected = by_hand(output_sequence_length=4)(TEXTS).numpy()
    assert sorted(ids.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (np.zeros((3, 2)), {}, DataError, "an input of text, but found x float64"),
        (np.array(TEXTS), {"feature": "x"}, OptionError, "'x' of one input"),
        ({"a": np.array(TEXTS), "b": np.array(TEXTS)}, {}, OptionError, "None of a, b"),
        ({"a": np.array(TEXTS), "b": np.zeros(4)}, {"feature": "b"}, OptionError, "'b' of a"),
        ((np.array(TEXTS), np.zeros(4)), {}, DataError, "must be one, or a dict of them by name"),
        ({"a": {"b": np.array(TEXTS)}}, {}, DataError, "several in a tuple, or within each other"),
        (np.array(TEXTS), {"max_token": 5}, OptionError, "found max_token. Choose from max_tokens"),
        (np.array(TEXTS), {"vocabulary": ["a"]}, OptionError, "to read its vocabulary from the da"),
        (np.array(TEXTS), {"output_mode": "no"}, OptionError, "that TextVectorization takes.*mode"),
    ],
)
def test_what_cannot_be(data, options, error, message):
    with pytest.raises(error, match=message):
        tfdist.text_vectorizer((data,), **options)
