"""A calibration: the sums over text, the statistics made of them, and the file that holds them.

Imports `introspection` and `distributed`. Says nothing of how a calibration is used: that is `installation`.
"""

from velox_fn.directions.query_gram import average_gqa_filters, compute_qfilters

__all__ = ["average_gqa_filters", "compute_qfilters"]
