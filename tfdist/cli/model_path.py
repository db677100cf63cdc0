"""``--model`` of the verbs: see ``tfdist.training.model_path``."""

from tfdist.training.model_path import check, load

__all__ = ["check", "load"]
