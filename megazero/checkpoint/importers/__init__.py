"""Other frameworks' checkpoints as full, logical parameters (`foreign.ForeignCheckpoint`), read one tensor at a time."""
