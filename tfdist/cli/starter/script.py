"""The same training in Python: on one device or all GPUs, or on the workers of `tfdist launch`."""

import tfdist  # first: it has TensorFlow take Keras 2, where there are two

from model import model_fn

with tfdist.strategy("auto") as strategy:
    model = strategy.build(model_fn)  # an ordinary keras.Model, whose fit is distributed
    train = strategy.dataset("data/digits/train", global_batch_size=128)
    validation = strategy.dataset("data/digits/validation", global_batch_size=128, training=False)
    test = strategy.dataset("data/digits/test", global_batch_size=128, training=False)
    keep = tfdist.Checkpoints("runs/script", resume=True)  # a second run goes on where this ends
    model.fit(train, epochs=5, validation_data=validation, callbacks=[keep], verbose=2)
    model.evaluate(test, verbose=2)
    strategy.save(model, "digits.keras")  # loads without tfdist, in Keras 2
