"""The comparison's engine: what runs, and what is found on disk again."""

import dataclasses

import pytest

from velox_cache.evaluation.cells import Cells
from velox_cache.evaluation.compare import Contender, Measurement, compare
from velox_cache.harness.arms import FULL, Arm, cache_maker


def contenders(*arms):
    return [Contender(arm, list) for arm in (FULL, *arms)]


A, B = Arm("a", "l2norm", {"budget": 8}), Arm("b", "l2norm", {"budget": 8, "recent": 2})


class Counted:
    """A measurement that notes whom it ran for."""

    def __init__(self, **options):
        self.ran: list[list[str]] = []
        self.measurement = Measurement("perplexity", "text", 0, {"n": 1}, 10, self.run, **options)

    def run(self, contenders, advance):
        self.ran.append([one.arm.label for one in contenders])
        advance(4)
        return [{"value": one.arm.label} for one in contenders]


def test_every_arm_gets_its_own_result(tmp_path):
    rows = compare([Counted().measurement], contenders(A, B), Cells(tmp_path / "cells.jsonl", {}))
    assert [(row.arm, row.values["value"]) for row in rows] == [(x, x) for x in ("full cache", "a", "b")]


def test_what_is_on_disk_is_not_measured_again(tmp_path):
    counted = Counted()
    first = compare([counted.measurement], contenders(A, B), Cells(tmp_path / "cells.jsonl", {}))
    assert compare([counted.measurement], contenders(A, B), Cells(tmp_path / "cells.jsonl", {})) == first
    assert counted.ran == [["full cache", "a", "b"]]


@pytest.mark.parametrize(("compares", "ran"), [(False, ["b"]), (True, ["full cache", "b"])])
def test_a_new_arm_is_measured_alone_or_next_to_its_reference(tmp_path, compares, ran):
    counted = Counted(compares=compares)
    compare([counted.measurement], contenders(A), Cells(tmp_path / "cells.jsonl", {}))
    compare([counted.measurement], contenders(A, B), Cells(tmp_path / "cells.jsonl", {}))
    assert counted.ran[1] == ran


@pytest.mark.parametrize("change", ["identity", "sizes", "settings"])
def test_numbers_of_other_conditions_are_not_reused(tmp_path, change):
    counted = Counted()
    compare([counted.measurement], contenders(A), Cells(tmp_path / "cells.jsonl", {"model": "m"}))
    measurement = dataclasses.replace(counted.measurement, sizes={"n": 2 if change == "sizes" else 1})
    arm = Arm("a", "l2norm", {"budget": 8, "n_sink": 1}) if change == "settings" else A
    compare(
        [measurement],
        contenders(arm),
        Cells(tmp_path / "cells.jsonl", {"model": "other" if change == "identity" else "m"}),
    )
    assert len(counted.ran) == 2


def test_changed_defaults_of_a_method_are_other_conditions(tmp_path, tiny_model):
    model, counted = tiny_model(), Counted()
    full = Contender(FULL, cache_maker(model, FULL))
    once, later = (Arm("a", "l2norm", {"budget": 8, "recent": recent}) for recent in (1, 2))
    for default in (once, later):  # A leaves recent to install
        compare(
            [counted.measurement],
            [full, Contender(A, cache_maker(model, default))],
            Cells(tmp_path / "cells.jsonl", {}),
        )
    assert len(counted.ran) == 2


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path):
    counted, after = Counted(), Counted()

    def stop(contenders, advance):
        raise KeyboardInterrupt

    second = dataclasses.replace(after.measurement, seed=1)
    with pytest.raises(KeyboardInterrupt):
        compare(
            [counted.measurement, dataclasses.replace(second, run=stop)],
            contenders(A),
            Cells(tmp_path / "cells.jsonl", {}),
        )
    compare([counted.measurement, second], contenders(A), Cells(tmp_path / "cells.jsonl", {}))
    assert (len(counted.ran), len(after.ran)) == (1, 1)


def test_progress_counts_every_token_whether_measured_or_found(tmp_path):
    done: list[int] = []
    for _ in range(2):
        done.clear()
        compare(
            [Counted().measurement], contenders(A), Cells(tmp_path / "cells.jsonl", {}), lambda what, n: done.append(n)
        )
        assert sum(done) == 10


def test_the_full_cache_comes_first(tmp_path):
    with pytest.raises(ValueError, match="first contender"):
        compare([], contenders(A)[1:], Cells(tmp_path / "cells.jsonl", {}))


def test_two_arms_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="differ"):
        compare([], contenders(A, A), Cells(tmp_path / "cells.jsonl", {}))


def test_a_damaged_cell_is_named(tmp_path):
    file = tmp_path / "cells.jsonl"
    file.write_text('{"identity": {}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is damaged"):
        Cells(file, {})


def test_a_line_that_was_cut_short_is_measured_again(tmp_path):
    file = tmp_path / "cells.jsonl"
    for name in ("a", "b"):
        Cells(file, {}).put({"name": name}, name)
    file.write_text(file.read_text()[:-5])
    found = Cells(file, {})
    assert (found.get({"name": "a"}), found.get({"name": "b"})) == ("a", None)
    found.put({"name": "b"}, "again")
    assert Cells(file, {}).get({"name": "b"}) == "again"


def test_cells_bring_numbers_back_exactly(tmp_path):
    Cells(tmp_path / "cells.jsonl", {}).put({"a": 1}, {"x": 0.1 + 0.2})
    assert Cells(tmp_path / "cells.jsonl", {}).get({"a": 1}) == {"x": 0.1 + 0.2}
    assert Cells(tmp_path / "cells.jsonl", {}).get({"a": 2}) is None
