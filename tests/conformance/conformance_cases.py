"""The models, data and optimizers that every strategy must train as one device does.

Activations are smooth: a ReLU whose input rounds to the other side of its kink makes float32 runs
part on any two devices, which says nothing about a strategy.

A case is named ``kind-model[-data-optimizer]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GLOBAL_BATCH_SIZE = 12
#: That of the epochs after a resume that rescales; two ranks of 3 microbatches divide it, too.
RESCALED_BATCH_SIZE = 24
NUM_CLASSES = 3
SHUFFLE_SEED = 3

# name -> (records, sample weights); 48 divides by the batch, 49 leaves a tail of 1, 53 one of 5.
DATA = {
    "even": (48, None),
    "tail_of_1": (49, None),
    "weights": (53, "of records"),
    "weights_by_output": (53, "of outputs"),
}
CLIPPED = ("clipnorm", "clipvalue", "global_clipnorm")
#: (model, optimizer) -> data. Tracing costs more than steps: each is traced once for all its data.
TRAINED = {
    ("mlp", "adam"): ("even", "tail_of_1", "weights"),
    ("mlp", "momentum"): ("tail_of_1",),
    ("mlp", "clipnorm"): ("tail_of_1",),
    ("mlp", "clipvalue"): ("tail_of_1",),
    ("mlp", "global_clipnorm"): ("even", "tail_of_1"),
    ("convnet", "adam"): ("even", "tail_of_1", "weights"),
    ("convnet", "clipnorm"): ("even", "tail_of_1"),
    ("two_inputs", "adam"): ("weights",),
    ("two_inputs", "adagrad"): ("weights",),
    ("dict_outputs", "rmsprop"): ("tail_of_1", "weights_by_output"),
    ("dict_outputs", "clipvalue"): ("tail_of_1",),
    ("list_outputs", "adamw"): ("weights",),
    ("saturated", "momentum"): ("weights_by_output",),
    ("own_loss", "momentum"): ("tail_of_1",),
    ("super_loss", "adam"): ("weights",),
}
MODELS = tuple(dict.fromkeys(model for model, _ in TRAINED))

TRAIN_CASES = tuple(
    f"train-{model}-{data}-{optimizer}"
    for (model, optimizer), trained_on in TRAINED.items()
    for data in trained_on
)
OTHER_CASES = (
    *(f"evaluate-{model}" for model in MODELS),
    *(f"predict-{model}" for model in MODELS),
    "class_weight-mlp-tail_of_1-adam",
    "class_weight-mlp-weights-adam",
    "train_step-mlp",
    "resume-convnet",
    "rescale-convnet",
    "save-convnet",
)
CASES = (*TRAIN_CASES, *OTHER_CASES)

#: What `make test` has of a strategy: ``met`` tells what of it must be met. A trace costs more than
#: its steps, so that what trains is what other cases use again where that can be: all of the
#: convnet is one step, and what else an optimizer does is tried on the smallest model.
SHORT = (
    "train-mlp-tail_of_1-clipnorm",
    "train-mlp-tail_of_1-clipvalue",
    "train-mlp-even-global_clipnorm",
    "train-mlp-weights-adam",
    "train-convnet-weights-adam",
    "train-two_inputs-weights-adagrad",
    "train-dict_outputs-weights_by_output-rmsprop",
    "train-list_outputs-weights-adamw",
    "train-saturated-weights_by_output-momentum",
    "train-own_loss-tail_of_1-momentum",
    "train-super_loss-weights-adam",
    "evaluate-mlp",
    "evaluate-own_loss",
    "evaluate-super_loss",
    "predict-two_inputs",
    "predict-list_outputs",
    "predict-saturated",
    "class_weight-mlp-weights-adam",
    "train_step-mlp",
    "resume-convnet",
    "rescale-convnet",
    "save-convnet",
)
_INPUTS = {"two_inputs": "a dict"}
_OUTPUTS = {"dict_outputs": "a dict", "saturated": "a dict", "list_outputs": "a list"}
_LOSS = {"own_loss": "its own", "super_loss": "more"}


def met(case: str) -> set[tuple[str, ...]]:
    """Returns what ``case`` meets; one case of each must be in SHORT.

    Each model, each kind of data and each optimizer, each loss that an evaluation sees, and each
    structure that a prediction does. Their pairs are for `make test-all`.
    """
    kind, model, *rest = case.split("-")
    if kind == "train":
        data, optimizer = rest
        return {(model,), (data,), (optimizer,)}
    if kind == "evaluate":
        return {(kind, "loss", _LOSS.get(model, "compiled"))}
    if kind == "predict":
        inputs = (kind, "inputs", _INPUTS.get(model, "one"))
        return {inputs, (kind, "outputs", _OUTPUTS.get(model, "one"))}
    return {(kind,)}


def optimizer_of(model: str) -> str:
    """Returns the optimizer of the cases of ``model`` that do not name one."""
    return next(optimizer for trained, optimizer in TRAINED if trained == model)


def arrays(model: str, num_records: int, weights: str | None = None, seed: int = 0) -> tuple:
    """Returns (x, y[, sample_weight]), in the structures of the model's inputs and outputs."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(num_records, *shape)).astype(np.float32)

    def weight() -> np.ndarray:
        return rng.uniform(0.2, 3.0, num_records).astype(np.float32)

    x = {
        "convnet": lambda: rng.integers(0, 256, (num_records, 8, 8, 1), np.uint8),
        "two_inputs": lambda: {"left": normal(4), "right": normal(2, 3)},
    }.get(model, lambda: normal(6))()
    kind = rng.integers(0, NUM_CLASSES, num_records)
    y = {
        "dict_outputs": lambda: {"kind": kind, "flag": rng.integers(0, 2, (num_records, 1))},
        "list_outputs": lambda: (normal(2), kind),
        "saturated": lambda: {
            "kind": kind,
            "sort": np.eye(NUM_CLASSES, dtype=np.float32)[
                rng.integers(0, NUM_CLASSES, num_records)
            ],
            "flag": rng.integers(0, 2, (num_records, 1)),
        },
    }.get(model, lambda: kind)()
    if weights is None:
        return x, y
    return x, y, {name: weight() for name in y} if weights == "of outputs" else weight()


# Models ------------------------------------------------------------------------------------------


def build(model: str, optimizer: str) -> Any:
    """Returns the compiled Keras model; weights are drawn from the global seed."""
    return {
        "mlp": _judged_mlp if optimizer == optimizer_of("mlp") else _mlp,
        "convnet": _convnet,
        "two_inputs": _two_inputs,
        "dict_outputs": _dict_outputs,
        "list_outputs": _list_outputs,
        "saturated": _saturated,
        "own_loss": _own_loss,
        "super_loss": _super_loss,
    }[model](_optimizer(optimizer))


def build_with_own_step() -> Any:
    """Returns a model that takes half of each gradient, in a ``train_step`` of its own."""
    import tensorflow as tf
    from tensorflow import keras

    class HalfSteps(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred, sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            halves = [gradient / 2 for gradient in gradients]
            self.optimizer.apply_gradients(zip(halves, self.trainable_variables, strict=True))
            return self.compute_metrics(x, y, y_pred, sample_weight)

    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(NUM_CLASSES, "softmax")(inputs)
    built = HalfSteps(inputs, outputs)
    built.compile(_optimizer("momentum"), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return built


def _optimizer(name: str) -> Any:
    from tensorflow import keras

    optimizers = keras.optimizers
    # Dividing by the root of the gradient makes rounding large: a large epsilon keeps it small.
    adaptive = {"learning_rate": 0.01, "epsilon": 1e-3}
    if name in CLIPPED:
        # Below what the gradients of the first steps have: clipping takes place.
        limit = {"clipnorm": 0.05, "clipvalue": 0.01, "global_clipnorm": 0.1}[name]
        return optimizers.SGD(0.05, momentum=0.9, **{name: limit})
    if name == "adamw":
        optimizer = optimizers.AdamW(weight_decay=0.1, **adaptive)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer
    return {
        "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: optimizers.Adam(**adaptive),
        # All slots begin at 0, so that a model can be used as if it had never been trained.
        "adagrad": lambda: optimizers.Adagrad(initial_accumulator_value=0.0, **adaptive),
        "rmsprop": lambda: optimizers.RMSprop(momentum=0.5, **adaptive),
    }[name]()


def _classifier(inputs: Any, outputs: Any, optimizer: Any, *metrics: Any) -> Any:
    from tensorflow import keras

    built = keras.Model(inputs, outputs)
    built.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy", *metrics],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )
    return built


def auc_of_class_zero() -> Any:
    """Returns the AUC of "is it class 0": a metric whose mean over replicas would be wrong."""
    from tensorflow import keras

    class AucOfClassZero(keras.metrics.AUC):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_true == 0, y_pred[:, :1], sample_weight)

    return AucOfClassZero(name="auc")


def _judged_mlp(optimizer: Any) -> Any:
    return _mlp(optimizer, auc_of_class_zero())


def _mlp(optimizer: Any, *metrics: Any) -> Any:
    from tensorflow import keras

    layers = keras.layers
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    x = layers.Dense(16, "gelu", activity_regularizer=keras.regularizers.L2(1e-2))(x)
    return _classifier(inputs, layers.Dense(NUM_CLASSES, "softmax")(x), optimizer, *metrics)


def _convnet(optimizer: Any) -> Any:
    from tensorflow import keras

    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.Conv2D(16, 3, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Activation("elu")(x)
    x = layers.Conv2D(16, 3, strides=2, activation="tanh")(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(16)(x)
    x = layers.BatchNormalization(momentum=0.9, scale=False)(x)
    return _classifier(inputs, layers.Dense(NUM_CLASSES, "softmax")(x), optimizer)


def _two_inputs(optimizer: Any) -> Any:
    from tensorflow import keras

    layers = keras.layers
    left = keras.Input((4,), name="left")
    right = keras.Input((2, 3), name="right")
    a = layers.Dense(16, "tanh")(left)
    b = layers.Dense(16, "elu")(layers.Flatten()(right))
    joined = layers.LayerNormalization()(layers.Concatenate()([a, b]))
    return _classifier([left, right], layers.Dense(NUM_CLASSES, "softmax")(joined), optimizer)


def _dict_outputs(optimizer: Any) -> Any:
    """Two outputs by name, with metrics that are ratios of counts: no mean of them is right."""
    from tensorflow import keras

    layers, metrics = keras.layers, keras.metrics
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh")(inputs)
    built = keras.Model(
        inputs,
        {
            "kind": layers.Dense(NUM_CLASSES, "softmax", name="kind")(x),
            "flag": layers.Dense(1, "sigmoid", name="flag")(x),
        },
    )
    built.compile(
        optimizer,
        {"kind": "sparse_categorical_crossentropy", "flag": "binary_crossentropy"},
        loss_weights={"kind": 1.0, "flag": 0.3},
        metrics={
            "kind": ["accuracy", metrics.MeanIoU(NUM_CLASSES, name="iou", sparse_y_pred=False)],
            "flag": [metrics.Precision(name="precision"), metrics.AUC(name="auc")],
        },
        weighted_metrics={"flag": [metrics.Recall(name="recall")]},
    )
    return built


def _list_outputs(optimizer: Any) -> Any:
    """Two outputs by their order, joined before."""
    from tensorflow import keras

    layers, metrics = keras.layers, keras.metrics
    inputs = keras.Input((6,))
    x = layers.Dense(16, "gelu")(inputs)
    sizes = layers.Dense(2, name="sizes")(x)
    kind = layers.Dense(NUM_CLASSES, "softmax", name="kind")(layers.Concatenate()([x, sizes]))
    built = keras.Model(inputs, [sizes, kind])
    built.compile(
        optimizer,
        ["mse", "sparse_categorical_crossentropy"],
        loss_weights=[0.5, 2.0],
        metrics=[[metrics.RootMeanSquaredError(name="rmse")], ["accuracy"]],
        weighted_metrics=[["mae"], []],
    )
    return built


def _saturated(optimizer: Any) -> Any:
    """Outputs that round to 0 and 1: Keras takes their crossentropy from the logits behind them.

    One output is made early, so that a pipeline carries it to the stage of the loss.
    """
    from tensorflow import keras

    layers = keras.layers
    large = keras.initializers.RandomNormal(stddev=12.0)
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh")(inputs)
    flag = layers.Dense(1, "sigmoid", kernel_initializer=large, name="flag")(x)
    x = layers.Dense(16, "tanh")(x)
    sort = layers.Softmax(name="sort")(layers.Dense(NUM_CLASSES, kernel_initializer=large)(x))
    x = layers.Dense(16, "tanh")(x)
    kind = layers.Dense(NUM_CLASSES, "softmax", kernel_initializer=large, name="kind")(x)
    built = keras.Model(inputs, {"kind": kind, "sort": sort, "flag": flag})
    optimizer.learning_rate = 1e-3
    built.compile(
        optimizer,
        {
            "kind": "sparse_categorical_crossentropy",
            "sort": "categorical_crossentropy",
            "flag": "binary_crossentropy",
        },
        # A loss of 30 is rounded in its sixth figure.
        loss_weights={"kind": 0.1, "sort": 0.1, "flag": 0.1},
        metrics={"kind": ["accuracy"], "flag": ["accuracy"]},
    )
    return built


def _own_loss(optimizer: Any) -> Any:
    """A loss that is a mean of its own, and shows itself; nothing is compiled but metrics."""
    import tensorflow as tf
    from tensorflow import keras

    class OwnLoss(keras.Model):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.shown = keras.metrics.Mean(name="loss")

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
        ) -> Any:
            one_hot = tf.one_hot(tf.reshape(tf.cast(y, tf.int32), [-1]), NUM_CLASSES)
            loss = tf.reduce_mean(tf.square(one_hot - y_pred))
            loss += 1e-2 * tf.reduce_mean(tf.square(x)) + tf.add_n(self.losses)
            self.shown.update_state(loss)
            return loss

    built = OwnLoss(*_regularized())
    built.compile(optimizer, metrics=["accuracy"])
    return built


def _super_loss(optimizer: Any) -> Any:
    """The compiled loss, and one that is added to it."""
    import tensorflow as tf
    from tensorflow import keras

    class MoreLoss(keras.Model):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
        ) -> Any:
            compiled = super().compute_loss(x, y, y_pred, sample_weight)
            return compiled + 0.5 * tf.reduce_mean(tf.square(y_pred))

    built = MoreLoss(*_regularized())
    built.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return built


def _regularized() -> tuple[Any, Any]:
    """Returns inputs and outputs with losses of weights, of activations, and of a layer."""
    from tensorflow import keras

    class Centred(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            import tensorflow as tf

            self.add_loss(1e-2 * tf.reduce_mean(tf.square(x)))
            return x

    layers, l2 = keras.layers, keras.regularizers.L2(1e-2)
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh", kernel_regularizer=l2, activity_regularizer=l2)(inputs)
    return inputs, layers.Dense(NUM_CLASSES, "softmax")(Centred()(x))
