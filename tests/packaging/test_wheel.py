"""What is published: built as for a release, installed from the wheel alone, used by a package built on it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="of the development environment")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOWNSTREAM = Path(__file__).parent / "downstream"
PACKAGES = ("velox_fn", "velox_cache", "metal_src")
SHIPPED = {".py", ".pyi", ".metal", ".xz", ".typed"}
BUILT = {"__pycache__", "build", "dist", ".venv", ".venv-peers", ".git", "*.egg-info", ".*_cache", ".hypothesis"}


def run(*command: object, cwd: Path | None = None) -> str:
    """What the command prints. It sees no packages but those of its own environment."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and of the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"  # a copy: a build leaves files beside its sources
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*BUILT))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and the dependencies of this one's by its path."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder in a .pth file is searched, but .pth files in it are not obeyed: an editable install is not seen.
    parents = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(parents)))
    programs = folder / "bin"
    run(
        sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index",
        "--ignore-installed", wheel,
    )  # fmt: skip
    return programs


def files_under(*folders: str) -> set[str]:
    """The files of the source tree, without what running left there."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in found if path.suffix != ".pyc" and path.name != ".DS_Store"}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        beside = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
    expected = {name for name in files_under(*PACKAGES) if Path(name).suffix in SHIPPED or name.endswith("py.typed")}
    assert held == expected
    assert beside == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def test_the_sdist_holds_the_whole_tree(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = files_under(*PACKAGES, "tests", "docs", "typings", ".ci")
    expected |= {"Makefile", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml"}
    expected |= {".pre-commit-config.yaml", "pyproject.toml", "MANIFEST.in"}
    assert expected <= held
    assert not [name for name in held if "__pycache__" in name]


def test_the_index_takes_both(built: Path) -> None:
    pytest.importorskip("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.glob("velox_kv-*"))


def test_a_package_built_on_the_wheel_is_typed_and_runs(fresh: Path, tmp_path: Path) -> None:
    shutil.copytree(DOWNSTREAM, tmp_path, dirs_exist_ok=True)
    run(fresh / "python", "-m", "mypy", "--strict", "rows.py", cwd=tmp_path)
    said = run(fresh / "python", "try_it.py", cwd=tmp_path)
    homes = [line.removeprefix("from ") for line in said.splitlines() if line.startswith("from ")]
    assert len(homes) == len(PACKAGES)
    assert all(home.startswith(str(fresh.parent)) for home in homes)


def test_the_command_of_the_wheel_answers(fresh: Path, tmp_path: Path) -> None:
    from velox_cache import __version__

    assert run(fresh / "velox", "--version", cwd=tmp_path).strip() == f"velox {__version__}"
    assert "fusion" in run(fresh / "velox", "methods", cwd=tmp_path)
    assert "gguf" in run(fresh / "python", "-c", "import velox_cache.models.convert as c; print(c.gguf.__name__)")
