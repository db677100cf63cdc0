"""Training on Amazon SageMaker: what its containers run, and what is asked of it.

What runs inside a container (``container``, ``entry``, ``job``, ``evaluation``, ``sharding``,
``saved_model``) does not import boto3. Nothing is imported here.
"""
