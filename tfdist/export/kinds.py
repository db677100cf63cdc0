"""The names that a user can choose from; no TensorFlow here, the command line reads them."""

from __future__ import annotations

# name -> one line for people
QUANTIZATIONS = {
    "none": "float32 weights and arithmetic",
    "float16": "weights in half precision, arithmetic in float32",
    "dynamic": "int8 weights, activations rounded while it runs; needs no data",
    "int8": "int8 weights and activations; needs data to learn their ranges",
    "int16x8": "int8 weights, int16 activations; needs data",
}
AUTO = "auto"
NEEDS_DATA = ("int8", "int16x8")

INPUT_TYPES = ("auto", "float32", "uint8", "int8")
OUTPUT_TYPES = ("float32", "uint8", "int8")
FORMATS = ("tflite", "c")
#: A folder of versions for TensorFlow Serving.
TF_SERVING = "tf-serving"
