"""Metal kernels of Velox KV and the one module that launches them."""

from metal_src.launch import Cut, evict_apply, kernel_failure, metal_available, qfilters_score, threshold_and_quota

__all__ = ["Cut", "evict_apply", "kernel_failure", "metal_available", "qfilters_score", "threshold_and_quota"]
