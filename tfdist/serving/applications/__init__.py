"""A model as an application of other servers, in a folder that any machine can have."""
