"""Softmax regression for the digits: 650 weights, few enough for differential privacy.

Noise goes to each weight, so a small model keeps more of what 30 clients have learned.

tfdist shard digits fed --clients 30 --partition dirichlet:0.3
tfdist train --model tfdist.examples.digits_private:model_fn --strategy federated
    --data fed --epochs 30 -o local_epochs=5 -o local_batch_size=8 -o dp_noise_multiplier=2
    -o dp_clip_norm=1.0 --output runs/private
"""

from tensorflow import keras
from tensorflow.keras import layers


def model_fn() -> keras.Model:
    """Returns a compiled model of inputs uint8 [8, 8, 1] in 0..16, 10 classes."""
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Rescaling(1 / 16), layers.Flatten(), layers.Dense(10)],
        name="digits_private",
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
