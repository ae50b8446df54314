"""Print the lowest versions that pyproject allows of the packages needed to run, as a file of constraints for pip."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def lowest_bounds(pyproject: Path) -> list[str]:
    """`name==version` of every dependency, for this machine. Raises ValueError for one without a lower bound."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found = []
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        lowest = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if not lowest:
            raise ValueError(f"{requirement} has no lower bound: nothing says with what it was tried")
        found.append(f"{requirement.name}=={lowest[0]}")
    return found


if __name__ == "__main__":
    print("\n".join(lowest_bounds(Path(__file__).parents[2] / "pyproject.toml")))
