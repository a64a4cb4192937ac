"""Installs megazero, data_tools and the jobs: `pip install -e .`. Metadata is in pyproject.toml; no compiler is ever needed."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["megazero", "megazero.*", "data_tools"]),
    py_modules=["pretrain_gpt2", "evaluate_gpt2", "generate_samples"],
    package_data={"megazero": ["py.typed"], "data_tools": ["*.yaml"]},
)
