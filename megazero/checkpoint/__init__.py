"""Checkpoints: safetensors shards and a JSON index. Nothing is unpickled on load."""
