"""How fast strategies train on this machine: speed-up, throughput, scalability."""
