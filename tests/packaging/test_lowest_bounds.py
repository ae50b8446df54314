"""The versions that `make test-oldest` runs with are the lower bounds of pyproject."""

from pathlib import Path

import pytest
from lowest_bounds import lowest_bounds

PYPROJECT = """
[project]
dependencies = ["one>=1.2,<2", "two[cpu]>=0.3; python_version >= '3'", "three>=9; python_version < '3'", "four==4.5"]
"""


def test_every_dependency_of_this_machine_stands_at_its_lower_bound(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    assert lowest_bounds(tmp_path / "pyproject.toml") == ["one==1.2", "two==0.3", "four==4.5"]


def test_a_dependency_without_a_lower_bound_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["one<2"]\n')
    with pytest.raises(ValueError, match="one<2 has no lower bound"):
        lowest_bounds(tmp_path / "pyproject.toml")


def test_ours_all_have_one() -> None:
    assert len(lowest_bounds(Path(__file__).parents[2] / "pyproject.toml")) >= 7
