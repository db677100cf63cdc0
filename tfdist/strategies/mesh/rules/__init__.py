"""The conversions of Keras' own layers."""
