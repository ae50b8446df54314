"""What is read of a model: which layers can be bounded, its rotary embedding, its queries, this process's shard.

Imports mlx_lm's models and velox_fn, and nothing of velox_cache.
"""
