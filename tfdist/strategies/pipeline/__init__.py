"""Pipeline stages with microbatches: a model too large for one device, in plain TensorFlow."""
