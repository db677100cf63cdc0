"""A pipeline's definition carried out on this machine: its own scripts, with a stand-in for AWS."""
