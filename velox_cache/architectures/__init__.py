"""Every architecture of the installed mlx_lm: a small random model of each, and what can be bounded in it.

Imports `introspection`, `calibration` and `installation`. `velox inspect-model --all` and the tests import from here.
"""
