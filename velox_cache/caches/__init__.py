"""The bounded cache as mlx_lm knows caches: the adapter, its sequences, masks, state tuple and prompt files.

Imports velox_fn, `file_checks` and `known_methods` only. Everything else in velox_cache may import from here.
"""
