"""What README tells a newcomer to type works."""

import re
import shlex
from pathlib import Path

import pytest

from velox_cache import uninstall
from velox_cache.cli.main import argument_parser

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines() if line.strip()]


@pytest.mark.real_model
def test_python_blocks_run_in_order(smollm2_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VELOX_CACHE_DIR", str(smollm2_path.parent.parent))
    names: dict[str, object] = {}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), names)
    uninstall(names["model"])


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_links_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("velox ")])
def test_velox_commands_parse(line):
    words = shlex.split(line, comments=True)[1:]
    argument_parser(words[0]).parse_args(words)


@pytest.mark.parametrize("line", [line for line in SHELL if not line.startswith("velox ")])
def test_other_commands_are_targets_of_the_makefile(line):
    program, target = shlex.split(line, comments=True)
    assert program == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_readme_shows_both_ways_in():
    assert len(PYTHON) >= 2
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in SHELL}
