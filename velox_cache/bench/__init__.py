"""What eviction costs, measured beside mlx_lm's own caches: `velox bench`.

Every figure is a ratio of things timed in turn within one run. Times of two machines, or of one machine at two moments,
do not compare. Imports `installation` and what it is made of, and `doctor`; only `cli` imports from here.
"""
