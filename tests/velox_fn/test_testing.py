"""Each law catches a method that breaks it."""

import dataclasses

import mlx.core as mx
import pytest

import velox_fn
from velox_fn import at_intervals, keydiff, kv, l2norm, static_eviction
from velox_fn.testing import LAWS, check_method

PLAIN = l2norm(budget=16, n_sink=2)


def changed(**parts):
    return dataclasses.replace(PLAIN, **parts)


def evicts_before_attention(state, keys, values, *, queries=None, valid=None):
    after, _ = PLAIN.update(state, keys, values, valid=valid)
    return after, kv(after)


def waits(state, keys, values, *, queries=None, valid=None):
    keys.sum().item()
    return PLAIN.update(state, keys, values, valid=valid)


def forgets_to_tie(state, keys, values, *, queries=None, valid=None):
    after, view = PLAIN.update(state, keys, values, valid=valid)
    ranks = after.store.ranks + 0  # nobody evaluates this one
    return dataclasses.replace(after, store=dataclasses.replace(after.store, ranks=ranks)), view


def casts(state, keys, values, *, queries=None, valid=None):
    half = [rows.astype(mx.float16).astype(rows.dtype) for rows in (keys, values)]
    return PLAIN.update(state, *half, valid=valid)


def counts_padding(state, keys, values, *, queries=None, valid=None):
    return PLAIN.update(state, keys, values)


def by_share_of_block(keys, values, positions, params):
    norms = mx.square(keys.astype(mx.float32)).sum(-1)
    return norms / norms.sum(-1, keepdims=True)


@velox_fn.record
class Shared:
    store: velox_fn.Store
    basis: mx.array  # [D,D]


def with_a_shared_array(batch, n_kv_heads, head_dim, value_dim=None, dtype=mx.float32):
    store = PLAIN.init(batch, n_kv_heads, head_dim, value_dim, dtype).store
    return Shared(store=store, basis=mx.eye(head_dim))


@pytest.mark.parametrize(
    ("law", "method"),
    [
        ("states_are_records", changed(init=with_a_shared_array)),
        ("the_budget_holds", changed(settings={"budget": 12, "n_sink": 2})),
        ("a_block_sees_what_was_kept_and_itself", changed(update=evicts_before_attention)),
        ("an_update_traces", changed(update=waits)),
        ("nothing_is_left_unevaluated", changed(update=forgets_to_tie)),
        ("kept_rows_are_tokens_in_order", changed(update=casts)),
        ("padding_is_never_kept", changed(update=counts_padding)),
        (
            "the_kept_set_of_a_static_method_does_not_depend_on_the_calls",
            static_eviction("shares", by_share_of_block, budget=16, n_sink=2),
        ),
        (
            "the_kept_set_of_a_static_method_does_not_depend_on_the_calls",
            dataclasses.replace(keydiff(budget=16, n_sink=2), static=True),
        ),
    ],
)
def test_a_method_that_breaks_a_law_is_told_which(law, method):
    with pytest.raises(AssertionError):
        LAWS[law](method, velox_fn.testing.LAYER)
    with pytest.raises(AssertionError, match=f"{method.name} breaks the law "):
        check_method(method)


def test_a_method_that_keeps_the_laws_passes_all():
    check_method(PLAIN)


def test_intervals_are_not_tried_here():
    with pytest.raises(ValueError, match="give the method with interval=1"):
        check_method(at_intervals(PLAIN, 4))
