"""Random calls, trims, files and batches of caches that evict at intervals, for every method.

The oracle is the same method fed token by token by itself: what a cache keeps is a function of its tokens and pins
alone.
"""

import copy
import pickle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrated import needed_arrays, random_calibration
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from velox_cache import EvictingKVCache
from velox_fn import METHODS, Eviction, kept_positions, kv
from velox_fn.engine.batch import take
from velox_fn.registry import method_named
from velox_fn.testing import bits

H, D, WORDS, PROBE = 2, 32, 50, 7
BUDGET, WINDOW, PINNED = 14, 2, (5, 8)
SCALE = D**-0.5
_rng = np.random.default_rng(1)
KEYS, VALUES, QUERIES = (_rng.standard_normal((heads, WORDS, D)).astype(np.float32) for heads in (H, H, 2 * H))
KEYS[1, 3, 4], VALUES[0, 11, 2] = np.inf, np.nan  # two words whose rows should leave
TOKENS = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=30)


def method_of(name: str, **changes: Any) -> Eviction:
    method = method_named(name)
    arrays = needed_arrays(name, H, D)
    if "filters" in method.calibrated:
        arrays["filters"] = random_calibration(1, H, D).filters[0]
    window = {"recent": WINDOW} if method.recent or method.window else {}
    return method.make(budget=BUDGET, n_sink=1, **window, **arrays, **changes)


class IntervalMachine(RuleBasedStateMachine):
    name: str

    @initialize(
        interval=st.integers(2, 9),
        snapshots=st.integers(0, 2),
        pinned=st.sampled_from([(), (PINNED,)]),
        own=st.sampled_from([(), ((2, 4),)]),
        widths=st.sampled_from([(None, None), (None, None), (8, 8), (8, 4), (None, 4)]),
        dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
        shown=st.booleans(),
    )
    def start(self, interval: int, snapshots: int, pinned: Any, own: Any, widths: Any, dtype: Any, shown: bool) -> None:
        key_bits, value_bits = widths
        self.method = method_of(
            self.name, interval=interval, pinned=pinned, key_bits=key_bits, value_bits=value_bits, group_size=32
        )
        self.interval, self.most, self.dtype, self.shown = interval, snapshots, dtype, shown
        self.alone: dict[Any, EvictingKVCache] = {}
        self.cache, self.texts, self.pins = self.fresh(own), [()], [own]
        self.reached: list[list[int]] = [[]]  # boundaries of which there are snapshots, per sequence
        self.batched = False

    def fresh(self, own: Any) -> EvictingKVCache:
        cache = EvictingKVCache(self.method, true_queries=self.shown, snapshots=self.most)
        if own:
            cache.pin(own)
        return cache

    def call(self, cache: EvictingKVCache, words: np.ndarray) -> None:
        """The next words [B,S], cut where they must be."""
        start = 0
        for part in cache.parts(words.shape[1]):
            at = words[:, start : start + part]
            keys, values, queries = (
                mx.array(np.swapaxes(table[:, at], 0, 1)).astype(self.dtype) for table in (KEYS, VALUES, QUERIES)
            )
            cache.make_mask(part)
            view = cache.update_and_fetch(keys, values)
            cache.observe_queries(queries, queries, *view, SCALE)
            start += part

    def expected(self, text: tuple[int, ...], own: Any) -> EvictingKVCache:
        """A cache that got `text` token by token."""
        known = next(n for n in range(len(text), -1, -1) if n == 0 or (text[:n], own) in self.alone)
        cache = self.fresh(own) if known == 0 else copy.deepcopy(self.alone[text[:known], own])
        for n in range(known, len(text)):
            self.call(cache, np.array([[text[n]]]))
            self.alone[text[: n + 1], own] = copy.deepcopy(cache)
        return cache

    def passed(self, before: int, n_tokens: int) -> list[int]:
        """The boundaries that so many tokens pass."""
        first = max(-(-before // self.interval), 1)
        return list(range(first * self.interval, before + n_tokens, self.interval))

    def kept_of(self, *boundaries: int) -> list[int]:
        return list(boundaries[-self.most :]) if self.most else []

    @rule(words=TOKENS)
    def come(self, words: list[int]) -> None:
        self.call(self.cache, np.array([words] * len(self.texts)))
        self.reached = [
            self.kept_of(*reached, *self.passed(len(text), len(words)))
            for reached, text in zip(self.reached, self.texts, strict=True)
        ]
        self.texts = [(*text, *words) for text in self.texts]

    @precondition(lambda self: not self.batched)
    @rule(n_tokens=st.integers(1, 25))
    def trim(self, n_tokens: int) -> None:
        [text] = self.texts
        n_tokens = min(n_tokens, len(text))
        target, since = len(text) - n_tokens, len(text) % self.interval
        [reached] = self.reached
        held = [b for b in reached if b - self.interval <= target <= b]
        try:
            taken = self.cache.trim(n_tokens)
        except ValueError:
            assert n_tokens > since
            assert not held
            return
        assert taken == n_tokens
        self.texts = [text[:target]]
        self.reached = [[b for b in reached if b < target or (n_tokens <= since and b <= target)]]

    @rule(through=st.sampled_from(["state", "pickle"]))
    def save_and_load(self, through: str) -> None:
        if through == "pickle":
            self.cache = pickle.loads(pickle.dumps(self.cache))
        else:
            self.cache = EvictingKVCache.from_state(self.cache.state)
        self.reached, self.most = [[] for _ in self.texts], 0

    @rule(words=TOKENS)
    def a_fork_disturbs_nothing(self, words: list[int]) -> None:
        self.call(copy.deepcopy(self.cache), np.array([words] * len(self.texts)))

    @precondition(lambda self: len(self.texts) < 3)
    @rule(text=TOKENS, own=st.sampled_from([(), ((3, 6),)]), front=st.booleans())
    def join(self, text: list[int], own: Any, front: bool) -> None:
        other = self.fresh(own)
        self.call(other, np.array([text]))
        if self.batched:
            self.cache.extend(EvictingKVCache.merge([other]))
        else:
            self.cache = EvictingKVCache.merge([other, self.cache] if front else [self.cache, other])
        first = front and not self.batched
        self.texts = [tuple(text), *self.texts] if first else [*self.texts, tuple(text)]
        self.pins = [own, *self.pins] if first else [*self.pins, own]
        came = self.kept_of(*self.passed(0, len(text)))
        self.reached = [came, *self.reached] if first else [*self.reached, came]
        self.batched = True

    @precondition(lambda self: self.batched)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        left = data.draw(st.permutations(range(len(self.texts))))
        left = left[: data.draw(st.integers(1, len(left)))]
        self.cache.filter(left)
        self.texts, self.pins = [self.texts[b] for b in left], [self.pins[b] for b in left]
        self.reached = [self.reached[b] for b in left]

    @precondition(lambda self: self.batched)
    @rule(data=st.data())
    def extract(self, data: Any) -> None:
        b = data.draw(st.integers(0, len(self.texts) - 1))
        self.cache, self.batched, self.reached = self.cache.extract(b), False, [self.reached[b]]
        self.texts, self.pins = [self.texts[b]], [self.pins[b]]

    @invariant()
    def cache_holds_what_its_tokens_alone_decide(self) -> None:
        if not hasattr(self, "cache") or self.cache.empty():
            return
        assert np.array(self.cache.offset).reshape(-1).tolist() == [len(text) for text in self.texts]
        probed = copy.deepcopy(self.cache)  # by one token more: one that stands at a boundary may be cut or not
        self.call(probed, np.array([[PROBE]] * len(self.texts)))
        for b, (text, own) in enumerate(zip(self.texts, self.pins, strict=True)):
            expected = self.expected((*text, PROBE), own).record
            found = take(probed.record, [b])
            for one, other in zip(
                (kept_positions(found), *kv(found)), (kept_positions(expected), *kv(expected)), strict=True
            ):
                np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_whatever_happens_to_a_cache_its_tokens_decide_what_it_keeps(name: str) -> None:
    machine = type(f"IntervalMachine_{name}", (IntervalMachine,), {"name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=12, stateful_step_count=8, deadline=None, print_blob=True)
    case("runTest").runTest()
