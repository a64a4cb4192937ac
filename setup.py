"""Installs megazero and data_tools: `pip install -e .`. Metadata is in pyproject.toml; no compiler is ever needed."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["megazero", "megazero.*", "data_tools"]),
    package_data={"megazero": ["py.typed"], "data_tools": ["*.yaml"]},
)
