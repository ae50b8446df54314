"""The server's store of used prompt caches."""

from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache


class PromptPrefixes(LRUPromptCache):
    """mlx_lm's store of used prompt caches, which always leaves a token to run the model on.

    mlx_lm's server ends when a prompt is, to the last token, one whose cache it has: it asks for a batch row without
    tokens. Caches that can be trimmed seldom meet this, since their prefixes are dropped; those that have evicted do.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the cache of the longest known proper prefix of `tokens`, and the tokens that are not in it."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is None or rest:
            return cache, rest
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]
