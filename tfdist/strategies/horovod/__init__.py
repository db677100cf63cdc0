"""One process for each GPU or core, over MPI or Gloo: Horovod."""
