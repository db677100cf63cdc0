"""Weights on parameter servers, and workers that update them, each at its own pace."""
