"""The made-up classes: CurDKV lets the worthless rows go, H2O cannot tell them from the others."""

import dataclasses

import numpy as np
import pytest

from velox_cache.evaluation.synthetic_curdkv import synthetic_curdkv


@pytest.fixture(scope="module")
def found():
    return synthetic_curdkv(lengths=(40,), budgets=(6, 8), n_seeds=4)


def mean_share(rows, geometry, arm):
    return np.mean([one.class_2_share for one in rows if (one.geometry, one.arm) == (geometry, arm)])


@pytest.mark.parametrize("arm", ["curdkv", "curdkv, one block"])
def test_curdkv_keeps_no_worthless_row_but_the_sink(found, arm):
    assert mean_share(found, "planted_value_divergence", arm) == pytest.approx((1 / 6 + 1 / 8) / 2)


def test_h2o_is_blind_where_keys_are_alike(found):
    assert mean_share(found, "planted_value_divergence", "h2o") == pytest.approx(0.5, abs=0.1)


def test_curdkv_leads_where_keys_tell_too(found):
    assert mean_share(found, "correlated", "curdkv") < mean_share(found, "correlated", "h2o")


def test_two_runs_differ_in_times_only(found):
    again = synthetic_curdkv(lengths=(40,), budgets=(6, 8), n_seeds=4)
    timeless = [[dataclasses.replace(one, elapsed_ms=0.0) for one in rows] for rows in (found, again)]
    assert timeless[0] == timeless[1]
