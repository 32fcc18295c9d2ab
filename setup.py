"""Lists the packages: configs/ stays at the top of a checkout and is installed as data inside di_jax."""

from setuptools import find_namespace_packages, setup

code = find_namespace_packages(include=["di_jax*", "kernels_pallas*"], exclude=["*__pycache__*"])
setup(packages=[*code, "di_jax.configs"], package_dir={"di_jax.configs": "configs"})
