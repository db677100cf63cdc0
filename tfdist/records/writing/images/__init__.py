"""Folders of images: finding them, what is said beside them, and their bytes."""
