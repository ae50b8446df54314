"""Dependencies point one way, and the core neither waits for the device nor touches the world."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "velox_fn").rglob("*.py"))
AT_RUN = [path for path in CORE if path.parent.name != "testing"]  # the laws look at what a method did
SHELL = sorted((ROOT / "velox_cache").rglob("*.py"))
KERNELS = sorted((ROOT / "metal_src").glob("*.py"))

# Waiting for the device is right in what runs once: checks at construction, and offline calibration.
MAY_WAIT = {
    "codebooks.py": {"made_codebooks"},
    "constants.py": {"__init__"},
    "checks.py": {"finite_matrix", "not_zero"},
    "fusion.py": {"_checked_arrays"},
    "learned.py": {"_checked_arrays"},
    "query_gram.py": {"_check_not_empty", "query_gram_filters", "average_gqa_filters"},
}
WAITS = {"item", "tolist", "eval", "async_eval", "synchronize"}


def by_name(path):
    return str(path.relative_to(ROOT))


def tree(path):
    return ast.parse(path.read_text())


def when_run(node):
    """The nodes below this one, without what only type checkers read."""
    for_checkers = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for below in node.orelse if for_checkers else ast.iter_child_nodes(node):
        yield below
        yield from when_run(below)


def imports(path):
    """Top-level names of the packages that a module imports when it runs, also inside functions."""
    found = set()
    for node in when_run(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def third_party(path):
    import sys

    return imports(path) - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", CORE, ids=by_name)
def test_the_core_imports_arrays_records_and_the_kernel_launcher_only(path):
    assert third_party(path) <= {"mlx", "numpy", "chex", "velox_fn", "metal_src"}


@pytest.mark.parametrize("path", KERNELS, ids=by_name)
def test_the_kernel_launcher_imports_neither_core_nor_shell(path):
    assert third_party(path) <= {"mlx", "numpy", "metal_src"}


@pytest.mark.parametrize("path", CORE + SHELL + KERNELS, ids=by_name)
def test_chex_is_imported_by_the_records_alone(path):
    assert ("chex" in imports(path)) == (path == ROOT / "velox_fn" / "engine" / "records.py")


@pytest.mark.parametrize("path", CORE + SHELL + KERNELS, ids=by_name)
def test_nothing_imports_jax(path):
    assert not {name for name in imports(path) if name.startswith("jax")}


@pytest.mark.parametrize("path", AT_RUN, ids=by_name)
def test_the_core_reads_and_writes_nothing(path):
    assert not imports(path) & {"os", "pathlib", "io", "sys", "logging", "warnings", "subprocess", "shutil", "time"}
    calls = {
        node.func.id for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "open", "input"}


@pytest.mark.parametrize("path", AT_RUN, ids=by_name)
def test_the_core_waits_for_the_device_nowhere_but_at_construction(path):
    allowed = MAY_WAIT.get(path.name, set())
    waiting = {
        function.name
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and waits(node.func)
    }
    assert waiting <= allowed


def waits(function):
    numpy_copy = (
        isinstance(function.value, ast.Name) and function.value.id == "np" and function.attr in {"array", "asarray"}
    )
    return function.attr in WAITS or numpy_copy


@pytest.mark.parametrize("path", CORE, ids=by_name)
def test_the_core_has_no_global_state_that_changes(path):
    assert not [node for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    for node in tree(path).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        names = {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        assert names <= {"__all__"} or not isinstance(value, ast.List | ast.Dict | ast.Set)


@pytest.mark.parametrize("path", CORE, ids=by_name)
def test_only_the_registry_changes_and_it_does_so_behind_a_lock(path):
    assert ("threading" in imports(path)) == (path.name == "registry.py")


@pytest.mark.parametrize("path", CORE, ids=by_name)
def test_the_core_keeps_nothing_without_bound(path):
    # A trace or a closure for every setting that anyone ever tried would stay as long as the process.
    names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    assert "cache" not in names


# Which room imports which, from the ground up: a room imports those above it in this list, no other.
ROOMS = {
    "velox_fn.engine": set(),
    "velox_fn.directions": {"velox_fn.engine"},
    "velox_fn.methods": {"velox_fn.engine", "velox_fn.directions"},
    "version": set(),
    "file_checks": set(),
    "recommended": set(),
    "cache_folder": set(),
    "progress": set(),
    "slow_blas": set(),
    "distributed": set(),
    "models": {"cache_folder"},
    "introspection": set(),
    "known_methods": set(),
    "caches": {"file_checks", "known_methods"},
    "compression": {"caches", "introspection"},
    "doctor": {"slow_blas", "caches"},
    "calibration": {"file_checks", "cache_folder", "progress", "slow_blas", "distributed", "introspection"},
    "installation": {"recommended", "known_methods", "caches", "introspection", "calibration"},
    "advice": {"introspection", "installation"},
    "architectures": {"introspection", "calibration", "installation"},
    "compat": {"known_methods", "caches", "introspection", "calibration", "installation"},
    "serving": {"installation", "introspection", "caches"},
    "harness": {"known_methods", "file_checks", "caches", "introspection", "calibration", "installation"},
    "learning": {"file_checks", "calibration", "harness"},
    "evaluation": {"known_methods", "distributed", "caches", "introspection", "calibration", "installation", "harness"}
    | {"file_checks", "recommended", "serving", "compression"},
    "bench": {
        "recommended",
        "doctor",
        "known_methods",
        "file_checks",
        "caches",
        "introspection",
        "calibration",
        "installation",
    },
    "generation": {"installation", "introspection", "harness"},
    "serve": {"serving", "installation", "introspection", "caches"},
}
ANYTHING = {"cli", "__main__", "__init__"}


def modules_imported(path):
    """Dotted names of our own modules that a module imports, also inside functions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                yield f"{node.module}.{name.name}"
                yield str(node.module)


def room_of(dotted):
    package, *rest = dotted.split(".")
    if package == "velox_cache":
        return rest[0] if rest else "__init__"
    folders = {"engine", "directions", "methods"}
    return f"velox_fn.{rest[0]}" if package == "velox_fn" and rest and rest[0] in folders else None


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", CORE + SHELL, ids=by_name)
def test_a_room_imports_only_rooms_below_it(path):
    room = room_of(dotted(path))
    if room is None or room in ANYTHING:
        return
    rooms = {room_of(name) for name in modules_imported(path) if name.split(".")[0] in ("velox_fn", "velox_cache")}
    mine = "velox_fn." if room.startswith("velox_fn.") else ""
    found = {
        other for other in rooms - {None, room, "__init__"} if other.startswith(mine) and ("." in other) == bool(mine)
    }
    assert found <= ROOMS[room]


def test_the_list_of_rooms_has_no_circle():
    seen = set()
    for room, below in ROOMS.items():
        assert below <= seen, room
        seen.add(room)


def test_no_two_modules_import_each_other_in_a_circle():
    paths = {dotted(path).removesuffix(".__init__"): path for path in CORE + SHELL}
    imports_of = {name: {other for other in modules_imported(path) if other in paths} for name, path in paths.items()}
    left = dict(imports_of)
    while ready := [name for name, others in left.items() if not (others - {name}) & left.keys()]:
        for name in ready:
            del left[name]
    assert not left
