"""What every method is made of: records, rows, the one selection rule, landing, and the engines of the two families.

Imports nothing of `methods`; a method imports from here. Users take the public names from `velox_fn`.
"""
