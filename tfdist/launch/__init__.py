"""Starts processes, watches them, and ends every one of them.

Nothing heavy is imported here: each rank passes through this package when it starts.
"""
