"""A filled prompt cache cut down once, by what the model itself needs to repeat its context.

Imports `caches` and `introspection`.
"""
