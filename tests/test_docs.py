"""What the pages of the site tell a reader to type works, and its picture is that of the sources."""

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from velox_cache import uninstall
from velox_cache.cli.main import COMMANDS, argument_parser

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REPORT = {"results/README.md": (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


SHELL = [
    (page, line)
    for page in PAGES
    for code in blocks(page, "bash")
    for line in code.replace("\\\n", " ").splitlines()
    if line.split()
]


def run_blocks(page):
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), names)
    return names


def test_the_loop_of_ones_own_runs():
    assert run_blocks("own-loop.md")["caches"]


@pytest.mark.real_model
def test_the_first_page_runs(smollm2_path):
    names = run_blocks("index.md")
    uninstall(names["model"])


def code_lines(text):
    """The lines of a page that stand in a block, fenced or indented, those continued by a backslash as one."""
    fenced = [code for language, code in re.findall(FENCED, text) if language in ("", "bash")]
    unfenced = re.sub(FENCED, "", text)
    indented = re.findall(r"^    (\S.*)$", unfenced, re.MULTILINE)
    return "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()


VELOX_LINES = [
    (page, command)
    for page, text in (PAGES | REPORT).items()
    for line in code_lines(text)
    for command in re.findall(r"(?:^|/)velox ((?!-).*)$", line)
]
INLINE = [
    (page, span)
    for page, text in (PAGES | REPORT).items()
    for span in re.findall(r"`velox ([a-z][^`]*)`", re.sub(FENCED, "", text))
]


@pytest.mark.parametrize(("page", "line"), VELOX_LINES)
def test_velox_commands_parse(page, line):
    words = shlex.split(line, comments=True)
    argument_parser(words[0]).parse_args(words)


@pytest.mark.parametrize(("page", "span"), INLINE)
def test_velox_commands_in_the_text_have_the_options_that_they_name(page, span, capsys):
    words = shlex.split(span.replace("...", ""))
    assert words[0] in COMMANDS
    deepest = words[:2] if words[0] == "eval" and len(words) > 1 else words[:1]
    with pytest.raises(SystemExit, match="0"):
        argument_parser(words[0]).parse_args([*deepest, "--help"])
    told = capsys.readouterr().out
    for word in words:
        assert not word.startswith("--") or word in told or "--server-options" in words


def test_lines_outside_of_fences_are_found():
    assert {"curdkv.md", "distributed.md", "mlx_lm.md"} <= {page for page, _ in VELOX_LINES}
    assert ("mlx_lm.md", "inspect-model MODEL") in INLINE


def test_extras_that_pages_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for _, line in SHELL if line.startswith("pip ") for extra in re.findall(r"\[(\w+)\]", line)}
    assert {"blas", "plots"} <= named <= set(project["optional-dependencies"])


def test_the_picture_shows_what_the_sources_import():
    shown = runpy.run_path(str(ROOT / "docs" / "picture.py"))["on_page_markdown"](PAGES["how-it-works.md"])
    picture = re.search(r"```mermaid\n(.*?)```", shown, re.DOTALL).group(1)
    arrows = set(re.findall(r"(\w+) --> (\w+)", picture))
    assert {("velox_fn_methods", "velox_fn_directions"), ("velox_fn_engine", "metal_src")} <= arrows
    assert ("velox_fn_methods", "velox_fn_engine") not in arrows, "follows by way of directions"
    assert not [(start, end) for start, end in arrows if start.startswith("velox_fn") and end.startswith("velox_cache")]


def test_a_circle_of_folders_is_shown_whole():
    without_detours = runpy.run_path(str(ROOT / "docs" / "picture.py"))["without_detours"]
    circle = {"a": {"b", "c"}, "b": {"a", "c"}, "c": set()}
    assert without_detours(circle) == circle
    assert without_detours({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
