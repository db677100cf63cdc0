"""Shards of records that others wrote: read once, described in a manifest, never rewritten."""
