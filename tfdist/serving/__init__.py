"""A trained model behind HTTP: what `tfdist serve` starts."""
