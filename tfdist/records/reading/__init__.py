"""Records as batches, from whatever a user names as data."""
