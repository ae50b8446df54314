"""The server's store of used prompt caches."""

import copy
import logging
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, PromptTrie

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.introspection.query_tap import row_caches


class PromptPrefixes(LRUPromptCache):
    """mlx_lm's store of used prompt caches, which asks of a cache only what it can do.

    A cache that says it can take back tokens may still not reach as far back as a prompt wants: one that evicts at
    intervals, or has a rollback. Then the prompt's longest known prefix is used. There is always a token left to run
    the model on: mlx_lm's server fails at a prompt that is, to the last token, one whose cache it has.

    A cache is found by its tokens and by what is pinned in it: what it holds is a function of both.

    The store spares work; what fails in it is logged, and costs no request more than that work.
    """

    def __init__(self, max_size: int = 10, max_bytes: int = 1 << 63) -> None:
        super().__init__(max_size, max_bytes)
        self._trie = _ReachedPrefixes()
        self._fresh: list[Any] | None = None

    def begin_with(self, fresh: list[Any] | None) -> None:
        """Answer the next look-up with caches that pin what the empty caches `fresh` do: with these, where there are no
        others. None: nothing is pinned.
        """
        self._fresh = fresh

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the cache of the longest known proper prefix of `tokens`, and the tokens that are not in it."""
        fresh, self._fresh = self._fresh, None
        model = _with_pins(model, fresh or [])
        known = self._trie.search(model, tokens[:-1])
        prefixes = ((known.exact, len(tokens) - 1), (known.longer, known.common_prefix), (known.shorter, None))
        for stored, reach in prefixes:
            if not stored or (reach is not None and reach <= len(known.shorter or ())):
                continue
            length = len(stored) if reach is None else reach
            cache = _taken_back(self._trie.get(model, stored).prompt_cache, len(stored) - length)
            if cache is not None:
                return cache, tokens[length:]
        return fresh, tokens

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep `prompt_cache`, which holds `tokens`; drop what that makes needless, and what is too much."""
        try:
            super().insert_cache(_with_pins(model, prompt_cache), tokens, prompt_cache, cache_type=cache_type)
        except Exception:
            logging.exception("a prompt cache could not be stored")


class _ReachedPrefixes(PromptTrie):
    """Stored caches by their tokens; one makes those of its prefixes needless that it can be taken back to."""

    def pop_prefixes(self, model: Any, tokens: list[int]) -> list[tuple[int, Any]]:
        cache = self.get(model, tokens).prompt_cache
        needless = []
        for length, entry in super().pop_prefixes(model, tokens):
            if _taken_back(cache, len(tokens) - length) is None:
                self.add(model, tokens[:length], entry)
            else:
                needless.append((length, entry))
        return needless


def _with_pins(model: Any, cache: list[Any]) -> Any:
    """What the store knows caches of `model` by that pin what this one does."""
    pinned = next((one.pinned for one in row_caches(cache) if isinstance(one, EvictingKVCache)), ())
    return (model, pinned) if any(pinned) else model


def _may_reach(layer: Any) -> bool:
    """Whether asking this cache to take back tokens is right: at intervals, some can be at any time."""
    return layer.is_trimmable() or (isinstance(layer, EvictingKVCache) and layer.interval > 1)


def _taken_back(cache: list[Any], n_tokens: int) -> list[Any] | None:
    """A copy of `cache` without its last tokens, None if it cannot be had. Copies share arrays until they differ."""
    try:
        shorter = copy.deepcopy(cache)
        if n_tokens == 0:
            return shorter
        reached = all(map(_may_reach, row_caches(shorter))) and all(
            layer.trim(n_tokens) == n_tokens for layer in shorter
        )
    except Exception as error:  # a promise that one layer cannot keep; whatever it is, the tokens are computed instead
        logging.info(f"{n_tokens} tokens of a stored prompt cache cannot be taken back: {error}")
        return None
    return shorter if reached else None
