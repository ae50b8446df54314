"""The front door: `install` puts evicting caches into a model, with arguments and budgets for each layer.

Imports `caches`, `introspection` and `calibration`.
"""
