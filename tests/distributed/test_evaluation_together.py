"""A comparison shared out: no measurement twice, none lost, and a run that was ended goes on where it stood."""

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import each_rank

from velox_cache.distributed.collectives import own_share, shared_out

pytestmark = pytest.mark.slow

N_RANKS = 2
SUBJECTS = [f"subject-{n}" for n in range(5)]
ROWS = [f"{subject} {arm}" for subject in SUBJECTS for arm in ("full cache", "a")]


def compared(folder, folders, *victims):
    ended = each_rank(N_RANKS, "compare_together.py", folder, folders, len(SUBJECTS), *victims)
    ran = [(folder / f"ran_{rank}").read_text().split() for rank in range(N_RANKS)]
    return ended, ran


@pytest.mark.parametrize("folders", ["one", "each"])
def test_every_measurement_runs_once_and_every_rank_ends_with_all_rows(tmp_path, folders):
    ended, ran = compared(tmp_path, folders)
    assert [one.status for one in ended] == [0, 0], ended
    assert sorted(chain(*ran)) == SUBJECTS
    assert all(ran)
    for rank in range(N_RANKS):
        assert json.loads((tmp_path / f"rows_{rank}.json").read_text()) == ROWS


def test_after_a_rank_was_killed_what_it_finished_is_whole_and_only_the_rest_runs(tmp_path):
    ended, before = compared(tmp_path, "one", 1)
    assert ended[0].status == 1, ended
    assert "another process of this run has ended" in ended[0].err
    cells = (tmp_path / "cells").read_text().splitlines()
    assert cells
    assert all(json.loads(cell)["value"] for cell in cells)
    ended, after = compared(tmp_path, "one")
    assert [one.status for one in ended] == [0, 0], ended
    again = set(after[0][len(before[0]) :]) | set(after[1][len(before[1]) :])
    assert again == {before[1][-1]} | (set(SUBJECTS) - set(before[0]) - set(before[1]))
    assert json.loads((tmp_path / "rows_0.json").read_text()) == ROWS


@given(st.lists(st.integers(1, 50)), st.integers(1, 64))
def test_shares_hold_each_cell_once(costs, n_ranks):
    cells = list(enumerate(costs))
    shares = shared_out(cells, n_ranks, lambda cell: cell[1])
    assert len(shares) == n_ranks
    assert sorted(chain(*shares)) == cells


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 64))
def test_no_rank_has_more_to_do_than_another_by_more_than_one_cell(costs, n_ranks):
    loads = [sum(share) for share in shared_out(costs, n_ranks, float)]
    assert max(loads) - min(loads) <= max(costs)


def test_a_process_by_itself_does_all_that_is_not_done():
    assert own_share("abcde", None, done="bd".__contains__) == ["a", "c", "e"]
