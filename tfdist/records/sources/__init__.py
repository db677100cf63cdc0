"""What a user gave as data: told by what it is, before it is read."""
