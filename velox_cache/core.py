"""The calibration functions of velox_fn that velox_cache offers too, where users of the artifact look for them."""

from velox_fn.query_gram import average_gqa_filters, compute_qfilters

__all__ = ["average_gqa_filters", "compute_qfilters"]
