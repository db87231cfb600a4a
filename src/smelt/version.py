"""The version of Smelt: the single source that pyproject.toml, artifacts and reports read."""

__version__ = "0.2.0.dev0"
