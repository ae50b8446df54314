"""The version of the distribution, for both packages and for pyproject.toml, which reads it from here."""

__version__ = "0.1.0"
