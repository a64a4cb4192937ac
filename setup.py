"""Installs megazero: `pip install -e .`. Metadata is in pyproject.toml; no compiler is ever needed."""

from pathlib import Path

from setuptools import setup

version = Path(__file__).with_name("VERSION").read_text().strip()
setup(
    version=version,
    packages=["megazero", *(f"megazero.{p}" for p in ("mpu", "model", "data", "zero", "optim", "checkpoint"))],
)
