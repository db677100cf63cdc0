"""Data that lies in a bucket or behind a URL: fetched once into a cache, and written there."""
