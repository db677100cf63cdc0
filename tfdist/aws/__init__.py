"""Training on Amazon SageMaker: what its containers run, and what is asked of it.

What runs inside a container (``container``, ``entry``, ``job``, ``evaluation``, ``sharding``,
``saved_model``) imports neither the SageMaker SDK nor boto3. Nothing is imported here.
"""
