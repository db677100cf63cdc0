"""The files of a folder of shards: what is in them, byte by byte, and whether it is intact."""
