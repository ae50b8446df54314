"""The names of the two documents: `KVCacheConfig`, `KVCacheBuilder`, `QFiltersKVCache`, `CurDKVKVCache`,
`QFiltersCalibration` with `load_qfilters` and `save_qfilters`.

Imports `installation` and what it is made of; nothing imports this but users.
"""
