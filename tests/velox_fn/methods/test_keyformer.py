"""Keyformer: Gumbel-perturbed attention at a rising temperature, added up, against a loop written out."""

import mlx.core as mx
import numpy as np
import pytest
from arm_oracle import kept_after, simulated, tokens

from velox_fn import METHODS, keyformer
from velox_fn.engine.attention import Reading
from velox_fn.engine.select import rank_scores
from velox_fn.engine.store import used_rows

TAU_INIT, TAU_END, RISE, SEED, LAYER, FIRST_HEAD = 1.0, 3.0, 20, 5, 2, 1
SETTINGS = {
    "tau_init": TAU_INIT,
    "tau_end": TAU_END,
    "rise": RISE,
    "seed": SEED,
    "layer": LAYER,
    "first_head": FIRST_HEAD,
}


def finished(word):
    """MurmurHash3's last steps on 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> shift) * factor % 2**32
    return word ^ word >> 16


def gumbel(head, row, query=None):
    of_head = finished(finished(finished(SEED) ^ LAYER) ^ (FIRST_HEAD + head))
    bits = finished(of_head ^ row)
    bits = bits if query is None else finished(bits ^ query)
    return -np.log(-np.log(((bits >> 9) + 0.5) / 2**23))


def perturbed(keys, queries, head, held, block, tau, redraw, sinks=None, added=0.0):
    """Weights that each row held gets from the queries of the block, of the two query heads of a group."""
    mass = np.zeros(len(held))
    for query_head in (2 * head, 2 * head + 1):
        for at in block:
            seen = [i for i, row in enumerate(held) if row <= at]
            logits = np.array([queries[query_head, at] @ keys[head, held[i]] for i in seen], np.float64)
            noise = np.array([gumbel(head, held[i], at if redraw else None) for i in seen])
            there = np.broadcast_to(added, (block.stop, len(held)))[at, seen]
            raised = np.exp((logits / np.sqrt(keys.shape[2]) + there + noise) / tau)
            beside = 0.0 if sinks is None else np.exp(sinks[query_head] / tau)
            mass[seen] += raised / (raised.sum() + beside)
    return mass


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("calls", [[40], [25, 1, 1, 2, 3, 8], [1] * 40], ids=str)
def test_kept_rows_are_those_of_the_accumulated_score(calls, redraw):
    keys, values, queries = tokens(40)
    method = keyformer(budget=12, n_sink=2, recent=3, redraw=redraw, **SETTINGS)
    found = kept_after(method, keys, values, queries, calls)
    for head in range(2):

        def score(held, old, block, head=head):
            left = min(max(block[0] - 12, 0), RISE)
            tau = TAU_INIT + (TAU_END - TAU_INIT) * left / RISE
            return np.array(list(old.values())) + perturbed(keys, queries, head, held, block, tau, redraw)

        assert found[head] == simulated(calls, score, budget=12, n_sink=2, recent=3)


def test_sinks_and_numbers_in_the_mask_cool_with_the_logits():
    keys, values, queries = tokens(20)
    sinks, added = np.array([2.0, -1.0, 0.5, 3.0], np.float32), np.random.default_rng(3).normal(size=(20, 20))
    method = keyformer(budget=20, n_sink=0, **{**SETTINGS, "tau_init": 3.0})
    state, view = method.observation.land(method.init(1, 2, 8, 6), mx.array(keys[None]), mx.array(values[None]), None)
    read = Reading(mx.array(queries[None]), view[0], mx.array(added.astype(np.float32))[None, None])
    state = method.observation.observe(state, read, sinks=mx.array(sinks))
    found = np.array(rank_scores(used_rows(state.store).ranks))[0]
    expected = [
        perturbed(keys, queries, head, list(range(20)), range(20), 3.0, redraw=False, sinks=sinks, added=added)
        for head in range(2)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("change", [{"seed": 6}, {"layer": 3}, {"first_head": 9}, {"redraw": True}, {"tau_init": 9.0}])
def test_each_setting_changes_what_is_kept(change):
    keys, values, queries = tokens(60, seed=1)
    kept = [
        kept_after(keyformer(budget=20, **{**SETTINGS, **more}), keys, values, queries, [60]) for more in ({}, change)
    ]
    assert kept[0] != kept[1]


def test_a_high_temperature_lets_attention_decide_nothing():
    keys, values, queries = tokens(60, seed=2)
    flat = keyformer(budget=12, n_sink=0, tau_init=1e6, tau_end=1e6)
    # Every query spreads its weight evenly, so that the oldest rows have the most.
    assert kept_after(flat, keys, values, queries, [60]) == [list(range(12))] * 2


@pytest.mark.parametrize(
    ("setting", "value"), [("tau_init", 0), ("tau_end", -1.0), ("tau_init", "1"), ("rise", 0), ("redraw", 1)]
)
def test_settings_that_cannot_work_are_refused(setting, value):
    with pytest.raises(ValueError, match=setting):
        METHODS["keyformer"](**{setting: value})
