"""Models too large for one device: Keras models on a Mesh-TensorFlow mesh of batch x model.

Shazeer et al. 2018, Mesh-TensorFlow, arXiv:1811.02084; the automatic layout is that of Shoeybi et
al. 2019, Megatron-LM, arXiv:1909.08053 (columns, then rows; heads; vocabulary).
"""

from __future__ import annotations

from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer

__all__ = ["UnsupportedLayerError", "register_layer"]
