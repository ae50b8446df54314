"""The search for the weights of a fusion, by what counts: the next-token distribution of the full cache.

Imports `harness` and `calibration`.
"""
