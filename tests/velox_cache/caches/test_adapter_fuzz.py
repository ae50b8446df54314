"""Random call sequences on one cache, against a slow oracle that remembers every token.

Each value names its token, so what a query may attend to, by view and mask, can be read off and compared as a set.
"""

import copy

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import StaticOracle

from velox_cache import EvictingKVCache
from velox_fn import estimate_filter_dir, kept_positions, kv, qfilters

H, D, D_V = 2, 4, 3
FILTERS = np.array([[1, -1, 2, 0], [0, 1, 1, -2]], np.float32)
TOKENS = st.sampled_from([1, 1, 1, 2, 3, 5, 8, 23])


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        n_sink=st.integers(0, 3),
        recent=st.integers(0, 6),
        spare=st.integers(1, 10),
        rollback=st.sampled_from([0, 0, 3]),
        calib_tokens=st.sampled_from([0, 0, 2, 9, 25]),
        seed=st.integers(0, 2**16),
    )
    def start(self, n_sink, recent, spare, rollback, calib_tokens, seed):
        budget = n_sink + recent + spare
        filters = {"filters": mx.array(FILTERS)} if calib_tokens == 0 else {"calib_tokens": calib_tokens}
        self.rng, self.rollback, self.calib_tokens, self.budget = (
            np.random.default_rng(seed),
            rollback,
            calib_tokens,
            budget,
        )
        self.method = qfilters(budget=budget, n_sink=n_sink, recent=recent, rollback=rollback, **filters)
        self.unseen = StaticOracle(budget, n_sink, recent, keep_all_until=calib_tokens)
        self.named = 0
        self.cache, self.rows = EvictingKVCache(self.method), [copy.deepcopy(self.unseen)]
        self.batched, self.credit = False, rollback

    # What the oracle says

    def kept(self, oracle):
        """Positions that each head keeps."""
        if oracle.offset == 0:
            return [[]] * H
        keys = mx.array(np.stack(oracle.keys, axis=1))
        filters = mx.array(FILTERS)
        if self.calib_tokens and oracle.offset >= self.calib_tokens:
            filters = estimate_filter_dir(keys[:, : self.calib_tokens])
        scores = np.array((keys * filters[:, None]).sum(-1))
        return [oracle.kept(scores[head]) for head in range(H)]

    def names(self, oracle):
        """Names of the kept tokens, per head."""
        return [
            {float(oracle.values[position][head, 0]) for position in kept}
            for head, kept in enumerate(self.kept(oracle))
        ]

    # Tokens

    def tokens(self, n_tokens):
        keys = self.rng.integers(-2, 3, (H, n_tokens, D)).astype(np.float32)
        if self.rng.random() < 0.2:
            keys[self.rng.integers(H), self.rng.integers(n_tokens), self.rng.integers(D)] = self.rng.choice(
                [np.nan, np.inf]
            )
        values = self.rng.integers(-2, 3, (H, n_tokens, D_V)).astype(np.float32)
        values[..., 0] = self.named + np.arange(n_tokens)
        self.named += n_tokens
        return keys, values

    def call(self, cache, oracles, n_tokens, lengths):
        """One call of the cache; row b has lengths[b] real tokens and NaN behind them."""
        keys = np.full((len(oracles), H, n_tokens, D), np.nan, np.float32)
        values = np.full((len(oracles), H, n_tokens, D_V), np.nan, np.float32)
        before = [self.names(oracle) for oracle in oracles]
        for b, length in enumerate(lengths):
            if length:
                keys[b, :, :length], values[b, :, :length] = self.tokens(length)
        mask = cache.make_mask(n_tokens)
        seen_keys, seen_values = (np.array(part) for part in cache.update_and_fetch(mx.array(keys), mx.array(values)))
        n = seen_keys.shape[2]
        if mask is None:
            visible = np.ones((len(oracles), n_tokens, n), bool)
        elif isinstance(mask, str):
            visible = np.broadcast_to(np.tri(n_tokens, n, n - n_tokens, dtype=bool), (len(oracles), n_tokens, n))
        else:
            assert mask.shape == (len(oracles), 1, n_tokens, n)
            visible = np.array(mask)[:, 0]
        for b, length in enumerate(lengths):
            assert not np.isnan(seen_values[b]).any()  # NaN under a mask still poisons attention
            assert visible[b].any(-1).all()
            for head in range(H):
                for t in range(length):
                    attended = seen_values[b, head, visible[b, t], 0].tolist()
                    assert len(attended) == len(set(attended))
                    assert set(attended) == before[b][head] | set(values[b, head, : t + 1, 0].tolist())
            oracles[b].see(keys[b, :, :length], values[b, :, :length])

    @rule(n_tokens=TOKENS)
    def update(self, n_tokens):
        self.call(self.cache, self.rows, n_tokens, [n_tokens] * len(self.rows))
        self.credit = min(self.credit + n_tokens, self.rollback)

    @precondition(lambda self: self.batched)
    @rule(data=st.data(), step=st.integers(3, 20))
    def ragged_prefill(self, data, step):
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=len(self.rows), max_size=len(self.rows)))
        longest = max(lengths)
        self.cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        for start in range(0, longest, step):
            n_tokens = min(step, longest - start)
            self.call(self.cache, self.rows, n_tokens, [min(max(length - start, 0), n_tokens) for length in lengths])
        self.cache.finalize()
        self.credit = min(self.credit + min(lengths), self.rollback)

    # Sequences joining, leaving and going back

    def another(self, n_tokens):
        cache, oracle = EvictingKVCache(self.method), copy.deepcopy(self.unseen)
        for n in n_tokens:
            self.call(cache, [oracle], n, [n])
        return cache, oracle

    @precondition(lambda self: not self.batched and not (self.rollback and self.calib_tokens))
    @rule(others=st.lists(st.lists(TOKENS, max_size=3), max_size=2))
    def merge(self, others):
        made = [self.another(n_tokens) for n_tokens in others]
        self.cache = EvictingKVCache.merge([self.cache, *(cache for cache, _ in made)])
        self.rows += [oracle for _, oracle in made]
        self.batched, self.credit = True, 0

    @precondition(lambda self: self.batched and len(self.rows) < 4)
    @rule(n_tokens=st.lists(TOKENS, max_size=3))
    def extend(self, n_tokens):
        cache, oracle = self.another(n_tokens)
        self.cache.extend(EvictingKVCache.merge([cache]))
        self.rows.append(oracle)
        self.credit = 0

    @precondition(lambda self: self.batched)
    @rule(data=st.data())
    def filter(self, data):
        order = data.draw(st.permutations(range(len(self.rows))))
        left = order[: data.draw(st.integers(1, len(order)))]
        self.cache.filter(left)
        self.rows = [self.rows[b] for b in left]

    @precondition(lambda self: self.batched)
    @rule(data=st.data())
    def extract(self, data):
        b = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache, self.rows, self.batched = self.cache.extract(b), [self.rows[b]], False

    @rule(n_tokens=TOKENS)
    def a_deep_copy_goes_on_by_itself(self, n_tokens):
        twin, rows = copy.deepcopy(self.cache), copy.deepcopy(self.rows)
        self.call(twin, rows, n_tokens, [n_tokens] * len(rows))
        self.check(twin, rows)

    @rule()
    def round_trip(self):
        self.cache = EvictingKVCache.from_state(self.cache.state)

    @rule(n_tokens=st.integers(1, 5))
    def trim(self, n_tokens):
        offsets = [oracle.offset for oracle in self.rows]
        n_tokens = min(n_tokens, min(offsets))
        whole = max(self.budget, self.calib_tokens - 1)  # tokens up to which nothing is evicted
        intact = max(offsets) <= whole
        try:
            taken = self.cache.trim(n_tokens)
        except ValueError:
            assert self.rollback
            assert not intact
            assert n_tokens > self.credit
            return
        if self.cache.empty() or (self.rollback == 0 and not intact):
            assert taken == 0
            return
        assert taken == n_tokens
        for oracle in self.rows:
            oracle.forget(n_tokens)
        self.credit = self.rollback if max(offsets) - n_tokens <= whole else self.credit - n_tokens

    # What must hold after every call

    @invariant()
    def cache_agrees_with_the_oracle(self):
        if hasattr(self, "cache"):
            self.check(self.cache, self.rows)

    def check(self, cache, rows):
        offsets = [oracle.offset for oracle in rows]
        offset = np.array(cache.offset).reshape(-1).tolist()
        assert offset == offsets
        assert cache.tokens_seen == offsets[0]
        assert cache.tokens_kept == len(self.kept(rows[0])[0])
        if cache.empty():
            assert max(offsets) == 0
            return
        assert cache.size() >= max(len(self.kept(oracle)[0]) for oracle in rows)
        assert cache.size() <= (
            self.budget if min(offsets) >= self.calib_tokens else max(self.budget, self.calib_tokens)
        )
        assert cache.nbytes > 0
        positions = np.array(kept_positions(cache.record))
        keys, values = (np.array(part) for part in kv(cache.record))
        for b, oracle in enumerate(rows):
            for head, kept in enumerate(self.kept(oracle)):
                assert positions[b, head].tolist() == kept + [-1] * (positions.shape[2] - len(kept))
                for row, position in enumerate(kept):
                    np.testing.assert_array_equal(keys[b, head, row], oracle.keys[position][head])
                    np.testing.assert_array_equal(values[b, head, row], oracle.values[position][head])
                assert np.isfinite(keys[b, head, len(kept) :]).all()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=14, deadline=None)
