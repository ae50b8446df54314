"""The version of the distribution."""

from velox_fn.version import __version__

__all__ = ["__version__"]
