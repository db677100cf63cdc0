"""Training on Amazon SageMaker: what its containers run, and what is asked of it.

What runs inside a container (``container``, ``entry``, ``job``, ``evaluation``, ``sharding``,
``saved_model``) does not import boto3. Nothing is imported here.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "model_trainer":
        raise AttributeError(f"module 'tfdist.aws' has no attribute {name!r}")
    from tfdist.aws.sdk3 import model_trainer

    return model_trainer
