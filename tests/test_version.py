"""One version, wherever it is asked for."""

import re
from pathlib import Path

import velox_cache
import velox_fn
from velox_cache.cli.main import main

ROOT = Path(__file__).parents[1]


def test_packages_command_and_citation_say_the_same(capsys):
    assert main(["--version"]) == 0
    said = capsys.readouterr().out.strip()
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE).group(1)
    assert velox_fn.__version__ == velox_cache.__version__ == cited
    assert said == f"velox {cited}"
