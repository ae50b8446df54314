"""Which budget fits a machine and a context: from what is known of a model without running it.

Imports `introspection` and `installation`; only `cli` imports from here.
"""
