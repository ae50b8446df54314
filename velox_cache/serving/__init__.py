"""Parts of mlx_lm's server that `velox_cache.serve` puts in the place of its own: what bounded caches need, and what
keeps one request that fails from ending the others.
"""
