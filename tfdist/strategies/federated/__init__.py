"""Strategy "federated": clients train on their own records, a server averages, on TFF."""
