"""Tracked directions on made-up rows: as good as exact ones with queries, not with keys in their place."""

from velox_cache.evaluation.synthetic_solver import synthetic_solver


def test_keys_in_place_of_queries_are_what_tracking_is_not_close_for():
    own, keys = synthetic_solver(decays=(1.0,), evictions=40)
    assert (own.queries, keys.queries) == ("own", "keys")
    assert own.most <= 1
    assert keys.kept_by_one_alone > 1
