"""What eviction costs, measured beside mlx_lm's own caches: `velox bench`.

Everything here is a ratio of things timed in turn within one run, since times of one machine at two moments, or of two
machines, say little.
"""
