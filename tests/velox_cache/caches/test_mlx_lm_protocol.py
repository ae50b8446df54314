"""An mlx_lm whose caches are asked other things than ours answer is told of with words."""

import tomllib
from pathlib import Path
from types import ModuleType

import mlx_lm.models.cache as installed
import pytest

from velox_cache import install
from velox_cache.caches import mlx_lm_protocol as protocol
from velox_cache.caches.mlx_lm_protocol import TESTED, check_protocol, protocol_faults


def pretended(**classes: type) -> ModuleType:
    module = ModuleType("cache")
    vars(module).update(vars(installed))
    vars(module).update(classes)
    return module


def test_the_installed_one_fits() -> None:
    assert protocol_faults() == ()
    check_protocol()


def test_a_name_that_evicting_caches_do_not_have_is_told() -> None:
    class Older(installed.KVCache):
        meta_state = ""

    assert protocol_faults(pretended(KVCache=Older)) == ("its caches have meta_state, which evicting caches do not",)


def test_a_name_that_we_call_and_they_do_not_have_is_told() -> None:
    class Bare:
        update_and_fetch = make_mask = state = nbytes = trim = merge = keys_and_values = None

    assert protocol_faults(pretended(KVCache=Bare)) == ("its KVCache has no from_state",)


def test_install_refuses_with_the_versions_that_work(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "protocol_faults", lambda: ("its caches dance",))
    with pytest.raises(RuntimeError, match=r"its caches dance.*pip install 'mlx-lm>="):
        install(tiny_model(), "l2norm", budget=16)


def test_the_versions_that_work_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert TESTED in project["dependencies"]
