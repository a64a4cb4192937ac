"""Elementwise optimizers, learning-rate schedules and loss scaling; nothing here communicates."""
