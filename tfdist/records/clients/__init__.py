"""The clients of federated learning: who they are, and what each one has."""
