"""The names of the two documents: `KVCacheConfig`, `KVCacheBuilder`, `QFiltersKVCache`, `CurDKVKVCache`.

Imports `installation` and what it is made of; nothing imports this but users.
"""
