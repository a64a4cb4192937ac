"""What `python -m megazero.checkpoint` does, a file for each command; `import` is the package `importers`."""
