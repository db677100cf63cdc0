"""Sources that are read once: what their records are, and shards of any number of them."""
