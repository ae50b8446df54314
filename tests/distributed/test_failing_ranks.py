"""When one of three processes fails, the others say so and end, each by itself, in bounded time."""

import signal

import pytest
from launching import each_rank, launched


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_was_killed_say_so_and_end():
    first, killed, third = each_rank(3, "calibrate_failing.py", "killed")
    assert killed.status == -signal.SIGKILL
    for rank in (first, third):
        assert rank.status == 1, rank
        assert "another process of this run has ended" in rank.err


def test_an_error_of_one_rank_is_told_by_all():
    first, failed, third = each_rank(3, "calibrate_failing.py", "raised")
    assert (failed.status, "out of paper" in failed.err) == (1, True)
    for rank in (first, third):
        assert rank.status == 1, rank
        assert "rank 1 of 3 failed: this rank is out of paper" in rank.err


@pytest.mark.slow
def test_ranks_that_were_given_different_texts_refuse_to_share_them_out():
    for rank in each_rank(2, "calibrate_failing.py", "other-texts"):
        assert rank.status == 1, rank
        assert "the ranks were given different work" in rank.err


@pytest.mark.slow
def test_the_launcher_ends_all_ranks_when_one_is_killed():
    ended = launched(2, "calibrate_failing.py", "killed")
    assert ended.status is not None
    assert "rank 1 exited with code -9" in ended.err
