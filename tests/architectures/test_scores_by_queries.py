"""Scores by the model's own attention are those of its softmax, computed again in numpy from what it was given."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from runs import BOUNDED, evicting, installed, rows_of, run
from tiny_models import LATENT, LATENT_TWICE, model_of

import velox_cache as vc
from velox_fn import kv
from velox_fn.engine import select

CALLS = (17, 1, 10)
REFUSED = ("gemma2", "plamo2")  # attention by hand
# Attention over arrays made of what the cache returned: cast, tiled once per query head, or made of its latents.
OVER_OTHERS = (*LATENT, *LATENT_TWICE, "plamo", "stablelm")
SHOWN = tuple(name for name in BOUNDED if name not in REFUSED)


@dataclass(frozen=True, eq=False)
class Attention:
    """The arguments of one call of mx.fast's attention, as numpy arrays."""

    queries: np.ndarray  # [B,H_q,S,D]
    keys: np.ndarray  # [B,H,N,D]
    scale: float
    mask: Any
    sinks: np.ndarray | None

    def mass(self, n_kv_heads: int) -> np.ndarray:
        """What each row receives, summed over the queries and over the heads that share it. [B,H,N]"""
        (batch, heads, n_keys, _), n_queries = self.keys.shape, self.queries.shape[2]
        grouped = self.queries.reshape(batch, heads, -1, *self.queries.shape[2:])
        logits = self.scale * np.einsum("bhgsd,bhnd->bhgsn", grouped, self.keys)
        if self.mask is not None:
            causal = np.arange(n_keys) <= np.arange(n_keys - n_queries, n_keys)[:, None]
            mask = causal if isinstance(self.mask, str) else np.array(self.mask)
            if mask.dtype == bool:
                logits = np.where(mask.reshape(n_queries, n_keys), logits, -np.inf)
            else:
                logits += np.maximum(mask, -1e9).reshape(batch, heads, -1, n_queries, n_keys)
        if self.sinks is not None:
            sinks = np.broadcast_to(self.sinks.reshape(1, heads, -1, 1, 1), (*logits.shape[:-1], 1))
            logits = np.concatenate([logits, sinks], axis=-1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        received = (weights / weights.sum(-1, keepdims=True))[..., :n_keys].sum((2, 3))
        return received.reshape(batch, n_kv_heads, -1, n_keys).sum(2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Attention]]:
    """Every attention call, below anything that wraps it."""
    found: list[Attention] = []
    attention = mx.fast.scaled_dot_product_attention

    def recording(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None) -> Any:
        arrays = rows_of(q), rows_of(k), scale, mask, None if sinks is None else rows_of(sinks)
        found.append(Attention(*arrays))
        return attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recording)
    return found


@pytest.mark.parametrize("architecture", SHOWN)
def test_scores_are_the_models_own_softmax(architecture: str, calls: list[Attention]) -> None:
    with installed(architecture, "h2o", budget=64, n_sink=0, grace=1) as model:
        calls.clear()  # of the probe
        _, caches = run(model, CALLS)
    n_layers = len(evicting(caches))
    for i, cache in enumerate(evicting(caches)):
        keys = rows_of(kv(cache.record)[0])
        expected = np.zeros(keys.shape[:3])
        for step, n_keys in enumerate(np.cumsum(CALLS)):
            if architecture in OVER_OTHERS:
                own = calls[step * n_layers + i]
            else:
                own = next(call for call in calls if np.array_equal(call.keys, keys[:, :, :n_keys]))
                calls.remove(own)  # layers that share projected keys cache them twice
            expected[:, :, :n_keys] += own.mass(keys.shape[1])
        scores = select.rank_scores(cache.record.store.ranks)[:, :, : keys.shape[2]]
        np.testing.assert_allclose(np.array(scores), expected, atol=1e-4)


@pytest.mark.parametrize("architecture", REFUSED)
def test_models_whose_queries_cannot_be_seen_are_refused(architecture: str) -> None:
    model = model_of(architecture)
    with pytest.raises(ValueError, match="queries"):
        vc.install(model, "h2o", budget=24)
    assert "make_cache" not in vars(model)
