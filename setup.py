"""Installs megazero: `pip install -e .`. Metadata is in pyproject.toml; no compiler is ever needed."""

from pathlib import Path

from setuptools import setup

PACKAGES = ("comm", "mpu", "model", "data", "zero", "optim", "checkpoint", "json_config", "runner")
version = Path(__file__).with_name("VERSION").read_text().strip()
setup(
    version=version,
    packages=["megazero", *(f"megazero.{name}" for name in PACKAGES)],
)
