"""Workers on one or several machines, connected by TensorFlow."""
