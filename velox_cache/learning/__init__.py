"""The search for the weights of a fusion: its loss is the distance from the full cache's next-token distribution.

Imports `harness` and `calibration`.
"""
