"""README's figure and table are made of a comparison's results, and mark what its intervals say."""

import runpy
from pathlib import Path

import pytest

from velox_cache.evaluation.compare import Row

ROOT = Path(__file__).parents[1]
PAGE = runpy.run_path(str(ROOT / "docs" / "front_page.py"))


def cell(arm, share, seed, kl, right):
    answers = [{"task": "needle", "logprobs": [-1.0 if right else -3.0, -2.0, -4.0, -4.0], "greedy": right}]
    return Row("context", "prose", seed, arm, share, None, {"kl_divergence": kl, "answers": answers})


ROWS = [
    row
    for seed in range(8)
    for row in (
        cell("full cache", "", seed, 0.0, True),
        cell("fusion", "1/4", seed, 0.1 + 0.01 * seed, True),
        cell("snapkv", "1/4", seed, 0.17 - 0.01 * seed, seed == 0),
        cell("streaming_llm", "1/4", seed, 0.4 + 0.01 * seed, seed == 0),
        cell("oracle", "1/4", seed, 0.01, True),
    )
]


def test_bold_is_what_no_method_is_shown_to_be_better_than():
    assert PAGE["table"](ROWS).splitlines()[2:] == [
        "| full cache | 0 | 8 |",
        "| fusion | **0.14** | **8** |",
        "| snapkv | **0.14** | 1 |",
        "| streaming_llm | 0.44 | 1 |",
    ]


def test_methods_that_are_not_shown_still_take_part():
    lines = PAGE["table"](ROWS, ("streaming_llm", "fusion")).splitlines()[3:]
    assert lines == ["| fusion | **0.14** | **8** |", "| streaming_llm | 0.44 | 1 |"]


def test_the_same_results_draw_the_same_figure(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        PAGE["draw"](ROWS, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "oracle (ceiling)" in (tmp_path / "one.svg").read_text()


def test_readme_has_a_place_for_the_table():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    replaced = PAGE["with_table"](page, "| here |")
    assert f"{PAGE['BEGIN']}\n| here |\n{PAGE['END']}" in replaced
    assert PAGE["with_table"](replaced, "| there |") == PAGE["with_table"](page, "| there |")
    with pytest.raises(ValueError, match="where the table goes"):
        PAGE["with_table"]("no marks", "| here |")
