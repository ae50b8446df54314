"""The methods by name, with the facts that installing one needs: the built-in ones, and those that users register.

The built-in ones are immutable. `register` adds to `_registered`, the one thing in the core that changes. It is a
mapping that is replaced as a whole behind a lock: whoever reads it has one that stays as it is. A registration lasts as
long as the process.
"""

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from velox_fn.engine.eviction import Eviction
from velox_fn.engine.named import Named
from velox_fn.method import Method
from velox_fn.methods.cur import cur
from velox_fn.methods.curdkv import curdkv
from velox_fn.methods.expected_attention import expected_attention
from velox_fn.methods.fusion import PER_TERM, fusion
from velox_fn.methods.h2o import h2o
from velox_fn.methods.keydiff import keydiff
from velox_fn.methods.keyformer import keyformer
from velox_fn.methods.l2norm import l2norm
from velox_fn.methods.lagkv import lagkv
from velox_fn.methods.learned import LEARNED, RECENT_SHARE, learned
from velox_fn.methods.morphkv import morphkv
from velox_fn.methods.nestedkv import nestedkv
from velox_fn.methods.qfilters import qfilters
from velox_fn.methods.random_eviction import random_eviction
from velox_fn.methods.snapkv import snapkv
from velox_fn.methods.streaming_llm import streaming_llm
from velox_fn.methods.tova import tova
from velox_fn.methods.triattention import triattention

_ENTRIES = (
    Method(name="qfilters", factory=qfilters, calibrated=("filters",), guesses=True, recent=True, rollback=True),
    Method(
        name="fusion",
        factory=fusion,
        calibrated=("filters", "mean_keys", *PER_TERM),
        needs_calibration=True,
        fuses=True,
        recent=True,
        rollback=True,
    ),
    Method(
        name="learned",
        factory=learned,
        calibrated=LEARNED,
        needs_calibration=True,
        recent=True,
        recent_share=RECENT_SHARE,
        rollback=True,
        reads_values=True,
    ),
    Method(name="curdkv", factory=curdkv, recent=True, reads_values=True),
    Method(name="h2o", factory=h2o, window="grace", rope="to renumber"),
    Method(name="tova", factory=tova, pools_heads=True),
    Method(name="snapkv", factory=snapkv, window="obs_window"),
    Method(name="keyformer", factory=keyformer, recent=True, recent_share=0.25, place=("layer", "first_head")),
    Method(name="morphkv", factory=morphkv, window="obs_window"),
    Method(name="cur", factory=cur, recent=True, reads_values=True),
    Method(name="lagkv", factory=lagkv, reads_values=True),
    Method(name="nestedkv", factory=nestedkv, recent=True),
    Method(name="l2norm", factory=l2norm, recent=True, rollback=True),
    Method(name="keydiff", factory=keydiff, calibrated=("mean_keys",), recent=True, rollback=True),
    Method(
        name="expected_attention",
        factory=expected_attention,
        calibrated=("query_mean", "query_cov"),
        recent=True,
        rollback=True,
        rope="when read",
        reads_values=True,
    ),
    Method(
        name="triattention",
        factory=triattention,
        calibrated=("query_centres",),
        needs_calibration=True,
        recent=True,
        rope="always",
    ),
    Method(name="streaming_llm", factory=streaming_llm, rollback=True, rope="to renumber"),
    Method(name="random", factory=random_eviction, recent=True, rollback=True, place=("layer", "first_head")),
)
BUILT_IN: Mapping[str, Method] = MappingProxyType({str(entry.name): entry for entry in _ENTRIES})
METHODS: Mapping[str, Callable[..., Eviction]] = Named(
    {name: method.factory for name, method in BUILT_IN.items()},
    """The factories of the built-in methods by name, such as METHODS["h2o"](budget=512): each returns an `Eviction`.

    Common arguments, as far as a factory takes them. budget: most rows kept per KV head, sinks and recent ones
    included. n_sink: leading tokens that always stay. recent: trailing tokens that always stay; `install` and
    `Method.make` take it for h2o's grace and snapkv's obs_window too. rollback: tokens that can be taken back after
    evictions. interval: rows leave only at multiples of so many tokens. All of them are whole numbers, and raise
    ValueError where they cannot work, as when n_sink + recent leave no row of the budget free.

    The Eviction takes in keys [B,H,S,D], values [B,H,S,D_v] and queries [B,H_q,S,D], after RoPE, in the model's dtype.
    Methods of your own: `register`; those and these: `all_methods`.
    """,
)
"""The factories of the built-in methods by name."""
ALIASES: Mapping[str, str] = MappingProxyType({"knorm": "l2norm"})


class _Registered:
    """The methods that users have registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.methods: Mapping[str, Method] = MappingProxyType({})

    def change(self, name: str, method: Method | None, *, replace: bool) -> None:
        with self._lock:
            held = self.methods.get(name)
            if held is not None and method is not None and held != method and not replace:
                raise ValueError(
                    f"{name!r} is registered already, as another factory or with other facts; take another name, or "
                    "say replace=True"
                )
            others = {other: entry for other, entry in self.methods.items() if other != name}
            self.methods = MappingProxyType(others if method is None else {**others, name: method})


_registered = _Registered()


def register(name: str, factory: Callable[..., Eviction], *, replace: bool = False, **facts: Any) -> Method:
    """Make a method of your own known by name: to install, saving and loading, the command line and comparisons.

    A registration lasts as long as the process. Registering the same once more changes nothing. A package that should
    be known without an import declares an entry point of the group `velox_kv.methods`.

    Args:
        name: of the method, and of the Evictions that the factory makes.
        factory: takes keyword arguments with defaults, `budget` among them, and returns an Eviction whose `settings`
            and `params` are those arguments.
        replace: take the place of an earlier registration, as when a notebook runs a cell again.
        facts: the fields of `Method`, such as recent=True.

    Raises:
        ValueError: the name belongs to a built-in method or another registration, or a fact does not fit.
    """
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(f"a method's name is a word, such as 'my_method', got {name!r}")
    if name in BUILT_IN or name in ALIASES or name == "full":
        raise ValueError(f"{name!r} is the name of a built-in method; take another one")
    method = Method(name=name, factory=factory, **facts)
    _registered.change(name, method, replace=replace)
    return method


def unregister(name: str) -> None:
    """Forget a registered method. Nothing happens for other names.

    Caches that run it go on. A saved one cannot be loaded.
    """
    _registered.change(name, None, replace=True)


def all_methods() -> Mapping[str, Method]:
    """The built-in methods, then the registered ones, by name."""
    return MappingProxyType({**BUILT_IN, **_registered.methods})


def method_named(name: str) -> Method:
    """The method of this name or alias. Raises ValueError that lists the known ones."""
    method = find_method(name)
    if method is None:
        raise ValueError(
            f"there is no method {name!r}; the methods are {', '.join(all_methods())}. One of your own is known once "
            "velox_fn.register has named it"
        )
    return method


def find_method(name: str) -> Method | None:
    """The method of this name or alias, or None."""
    return all_methods().get(ALIASES.get(name, name)) if isinstance(name, str) else None


def method_factory(name: str) -> Callable[..., Eviction]:
    """The factory of the method of this name or alias. Raises ValueError that lists the known ones."""
    return method_named(name).factory
