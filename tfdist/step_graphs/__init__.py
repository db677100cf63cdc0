"""What a traced step does: its operations, their FLOPs, the bytes that lie on devices meanwhile."""
