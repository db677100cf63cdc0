"""``tfdist verify``: does a strategy give one device's weights?"""

from __future__ import annotations

from tfdist.equivalence.report import Explanation, LayerDifference, LossComparison, Report
from tfdist.equivalence.verifying import verify

__all__ = ["Explanation", "LayerDifference", "LossComparison", "Report", "verify"]
