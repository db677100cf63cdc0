"""HuggingFace's TensorFlow models as their docs train them: on replicas as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import transformers
from scenarios import scenario
from tensorflow import keras

TOLERANCE = 1e-5
# Batches of 8: the last one has a row, so that a replica has none.
ROWS, LENGTH, BATCH = 17, 6, 8
# One layer, and nothing that is drawn.
BERT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILBERT = {
    "dim": 8,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 8,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
GPT2 = {
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SHARED = {"vocab_size": 30, "num_labels": 3}


def optimizer() -> keras.optimizers.Optimizer:
    # A bias of attention's keys changes nothing: its gradient is rounding, which Adam enlarges.
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def texts() -> dict[str, np.ndarray]:
    """What a tokenizer returns: texts of 2 to 6 tokens, padded."""
    drawn = np.random.default_rng(0)
    lengths = drawn.integers(2, LENGTH + 1, (ROWS, 1))
    lengths[::2] = LENGTH  # So that replicas have other numbers of tokens.
    mask = (np.arange(LENGTH) < lengths).astype(np.int64)
    return {"input_ids": drawn.integers(1, 30, (ROWS, LENGTH)) * mask, "attention_mask": mask}


def labels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 3, ROWS)


def batches(*records: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(records if len(records) > 1 else records[0]).batch(8)


@contextmanager
def eagerly() -> Iterator[None]:
    tf.config.run_functions_eagerly(True)  # Nothing is traced for one device.
    yield
    tf.config.run_functions_eagerly(False)


def assert_trains_as_one_device(
    strategy: Any, model_fn: Callable[[], Any], data: tf.data.Dataset
) -> Any:
    keras.utils.set_random_seed(1)
    model = strategy.build(model_fn)
    found = model.fit(data, epochs=2, verbose=0).history
    found["judged"] = model.evaluate(data, return_dict=True, verbose=0)["loss"]
    keras.utils.set_random_seed(1)
    reference = model_fn()
    with eagerly():
        expected = reference.fit(data, epochs=2, verbose=0).history
        expected["judged"] = reference.evaluate(data, return_dict=True, verbose=0)["loss"]
    assert expected["loss"][1] < expected["loss"][0] - 1e-3
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=TOLERANCE, err_msg=name)
    pairs = zip(model.trainable_weights, reference.trainable_weights, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, err_msg=theirs.name)
    return model


@scenario(long=True)
def bert_with_the_loss_that_it_has_itself(strategy, folder):
    def model_fn():
        config = transformers.BertConfig(**BERT, **SHARED)
        model = transformers.TFAutoModelForSequenceClassification.from_config(config)
        model.compile(optimizer())
        return model

    assert_trains_as_one_device(strategy, model_fn, batches({**texts(), "labels": labels()}))


@scenario(long=True)
def distilbert_with_a_loss_of_keras(strategy, folder):
    def model_fn():
        config = transformers.DistilBertConfig(**DISTILBERT, **SHARED)
        model = transformers.TFAutoModelForSequenceClassification.from_config(config)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss=loss, metrics=["accuracy"])
        return model

    model = assert_trains_as_one_device(strategy, model_fn, batches(texts(), labels()))
    said = model.predict(batches(texts()), verbose=0)
    assert said.logits.shape == (ROWS, 3)


@scenario("single", "mirrored", "horovod", "multi_worker", long=True)
def gpt2_whose_padding_has_no_label(strategy, folder):
    """Its loss is a mean over tokens, of which each replica has another number."""

    def model_fn():
        config = transformers.GPT2Config(**GPT2, **SHARED)
        model = transformers.TFAutoModelForCausalLM.from_config(config)
        model.compile(optimizer())
        return model

    of_tokens = np.where(texts()["attention_mask"], texts()["input_ids"], -100)
    assert_trains_as_one_device(strategy, model_fn, batches({**texts(), "labels": of_tokens}))


@scenario
def bert_within_a_functional_model(strategy, folder):
    def model_fn():
        inputs = {name: keras.Input((LENGTH,), dtype="int64", name=name) for name in texts()}
        config = transformers.BertConfig(**BERT, vocab_size=30)
        bert = transformers.TFBertModel(config, add_pooling_layer=False)
        first = bert(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0][:, 0]
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(first))
        model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_trains_as_one_device(strategy, model_fn, batches(texts(), labels()))
