"""The parts of mlx_lm's server that `velox_cache.serve` replaces.

Bounded caches need some of them. The others keep one request that fails from ending the rest. Imports `introspection`
and `caches`. `serve` and `evaluation` import from here.
"""
