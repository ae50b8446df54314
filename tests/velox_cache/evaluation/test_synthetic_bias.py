"""A bias against the drift of queries: which way a filter points that was calibrated without it."""

from velox_cache.evaluation.synthetic_bias import synthetic_bias


def test_a_bias_turns_the_sign_of_what_was_calibrated_before_it():
    found = {(row.bias, row.calibrated): row for row in synthetic_bias(sizes=(0.0, 2.0))}
    for size, calibrated, agrees in ((0.0, "before", 1), (0.0, "after", 1), (2.0, "before", 0), (2.0, "after", 1)):
        row = found[size, calibrated]
        assert row.positive_share == agrees
        assert (row.attention_correlation > 0.5) == bool(agrees)
        assert (row.attention_correlation < -0.5) == (not agrees)
