"""Evicting KV caches for mlx_lm: install one on a model and generate, batch or serve as before.

The public names are listed in `__init__.pyi` and imported when first used: `velox --help` need not wait for mlx.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
