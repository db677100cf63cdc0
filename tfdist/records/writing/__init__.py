"""From raw data to a folder of shards."""
