"""A long life of one batch: rows join, leave, fork, are saved and loaded, against a slow oracle of the rule.

VELOX_SOAK_STEPS sets the number of decode steps; 10000 is the full run, about a minute.
"""

import copy
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import velox_cache as vc
from velox_fn import kept_positions
from velox_fn.registry import method_factory

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("VELOX_SOAK_STEPS", "2500"))
HEADS, DIM, VALUE_DIM, QUERY_HEADS = 2, 4, 3, 4
BUDGET, N_SINK, RECENT = 12, 2, 3
FILTERS = np.array([[1, -2, 0, 1], [2, 1, -1, 0]], np.float32)
SCALE = 0.5


@dataclass
class Oracle:
    """What one sequence keeps, by the rule written out: per head, the kept tokens in order of arrival."""

    seen: int = 0
    kept: list[list[tuple[int, np.ndarray, np.ndarray]]] = field(default_factory=lambda: [[] for _ in range(HEADS)])

    def arrive(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in keys [H,S,D] and values [H,S,D_v]; evict."""
        for head in range(HEADS):
            for i in range(keys.shape[1]):
                self.kept[head].append((self.seen + i, keys[head, i], values[head, i]))
        self.seen += keys.shape[1]
        for head in range(HEADS):
            self.kept[head] = self._survivors(head)

    def _survivors(self, head: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        def standing(row: tuple[int, np.ndarray, np.ndarray]) -> tuple[float, int]:
            position, key, _ = row
            protected = position < N_SINK or position >= self.seen - RECENT
            return (np.inf if protected else float(key @ FILTERS[head]), -position)

        best = sorted(self.kept[head], key=standing, reverse=True)[:BUDGET]
        return sorted(best, key=lambda row: row[0])

    def attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The attention output [H_q,D_v] of one token's queries [H_q,D] over what is kept and the token itself."""
        outputs = []
        for query_head, query in enumerate(queries):
            head = query_head // (QUERY_HEADS // HEADS)
            rows = [(key, value) for _, key, value in self.kept[head]] + [(keys[head, 0], values[head, 0])]
            logits = np.array([query @ key for key, _ in rows]) * SCALE
            weights = np.exp(logits - logits.max())
            outputs.append(weights @ np.array([value for _, value in rows]) / weights.sum())
        return np.array(outputs)

    def positions(self) -> list[list[int]]:
        return [[position for position, _, _ in rows] for rows in self.kept]


class Life:
    """A batch of at most five rows, and an oracle for each."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.method = method_factory("qfilters")(budget=BUDGET, n_sink=N_SINK, recent=RECENT, filters=mx.array(FILTERS))
        self.batch: vc.EvictingKVCache | None = None
        self.oracles: list[Oracle] = []

    def tokens(self, n_rows: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Small whole numbers: scores are exact in any order of summation, and tie often."""
        keys = self.rng.integers(-3, 4, (n_rows, HEADS, n_tokens, DIM)).astype(np.float32)
        values = self.rng.standard_normal((n_rows, HEADS, n_tokens, VALUE_DIM)).astype(np.float32)
        queries = self.rng.standard_normal((n_rows, QUERY_HEADS, n_tokens, DIM)).astype(np.float32)
        return keys, values, queries

    def join(self) -> None:
        """One to three new rows, prefilled together, padded on the right."""
        n_new = int(self.rng.integers(1, 4))
        lengths = [int(self.rng.integers(1, 41)) for _ in range(n_new)]
        longest = max(lengths)
        new = vc.EvictingKVCache.merge([vc.EvictingKVCache(self.method) for _ in lengths])
        new.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        keys, values, _ = self.tokens(n_new, longest)
        step = int(self.rng.integers(5, 42))
        for start in range(0, longest, step):
            block = slice(start, min(start + step, longest))
            new.update_and_fetch(mx.array(keys[:, :, block]), mx.array(values[:, :, block]))
        new.finalize()
        mx.eval(new.state)
        for row, length in enumerate(lengths):
            self.oracles.append(Oracle())
            self.oracles[-1].arrive(keys[row, :, :length], values[row, :, :length])
        if self.batch is None:
            self.batch = new
        else:
            self.batch.extend(new)

    def leave(self) -> None:
        n_left = int(self.rng.integers(1, len(self.oracles)))
        staying = sorted(int(row) for row in self.rng.permutation(len(self.oracles))[:n_left])
        assert self.batch is not None
        self.batch.filter(staying)
        self.oracles = [self.oracles[row] for row in staying]

    def fork(self) -> None:
        """A copy of one row goes on by itself for a while, comes back as a row more, and the original is untouched."""
        assert self.batch is not None
        row = int(self.rng.integers(len(self.oracles)))
        alone, oracle = copy.deepcopy(self.batch).extract(row), copy.deepcopy(self.oracles[row])
        for n_tokens in self.rng.integers(1, 9, 4):
            keys, values, _ = self.tokens(1, int(n_tokens))
            alone.update_and_fetch(mx.array(keys), mx.array(values))
            oracle.arrive(keys[0], values[0])
        assert np.array(kept_positions(alone.record))[0].tolist() == oracle.positions()
        self.batch.extend(vc.EvictingKVCache.merge([alone]))
        self.oracles.append(oracle)

    def save_and_load(self) -> None:
        assert self.batch is not None
        with tempfile.TemporaryDirectory() as folder:
            vc.save_prompt_cache(Path(folder) / "batch", [self.batch])
            (self.batch,) = vc.load_prompt_cache(Path(folder) / "batch")

    def decode(self) -> None:
        """One token for every row; only the attention output is evaluated, as in generation."""
        assert self.batch is not None
        keys, values, queries = self.tokens(len(self.oracles), 1)
        mask = self.batch.make_mask(1)
        seen_keys, seen_values = self.batch.update_and_fetch(mx.array(keys), mx.array(values))
        output = mx.fast.scaled_dot_product_attention(mx.array(queries), seen_keys, seen_values, scale=SCALE, mask=mask)
        expected = np.array(
            [oracle.attend(queries[row, :, 0], keys[row], values[row]) for row, oracle in enumerate(self.oracles)]
        )
        np.testing.assert_allclose(np.array(output)[:, :, 0], expected, rtol=1e-4, atol=1e-5)
        for row, oracle in enumerate(self.oracles):
            oracle.arrive(keys[row], values[row])

    def check_rows(self) -> None:
        assert self.batch is not None
        assert np.array(self.batch.offset).tolist() == [oracle.seen for oracle in self.oracles]
        assert self.batch.size() <= BUDGET
        for row, oracle in enumerate(self.oracles):
            alone = self.batch.extract(row)
            assert alone.offset == oracle.seen
            assert np.array(kept_positions(alone.record))[0].tolist() == oracle.positions()


@pytest.mark.timeout(1800)
def test_a_long_life_of_joins_leaves_forks_saves_and_loads() -> None:
    life = Life(seed=0)
    life.join()
    memory = []
    for step in range(STEPS):
        draw = life.rng.random()
        if draw < 0.03 and len(life.oracles) < 5:
            life.join()
        elif draw < 0.06 and len(life.oracles) > 1:
            life.leave()
        elif draw < 0.08 and len(life.oracles) < 5:
            life.fork()
        elif draw < 0.09:
            life.save_and_load()
        life.decode()
        if step % 25 == 0:
            life.check_rows()
            memory.append(mx.get_active_memory())
    life.check_rows()
    assert max(memory[len(memory) // 2 :]) < max(memory[: len(memory) // 2]) + 2**20
