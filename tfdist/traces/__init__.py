"""Where the time of a step goes: traces of all ranks, read, lined up, and told."""
