"""Smaller before export: each call returns an ordinary Keras model, and what it cost."""
