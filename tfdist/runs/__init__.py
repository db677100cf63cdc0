"""A training as a whole: its folder, its settings, its processes, and what is told of it."""
