"""A method as the registry holds it: its factory, and what whoever installs it must know beforehand."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from velox_fn.engine import checks
from velox_fn.engine.chunks import chunked
from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.interval import at_intervals
from velox_fn.engine.merging import NO_MERGING, merging
from velox_fn.engine.pinned import pinning
from velox_fn.engine.quantised import NO_WIDTHS, quantised
from velox_fn.engine.vector_quantised import vector_quantised

ROPES = (None, "to renumber", "when read", "always")
PLACES = ("layer", "first_head")
_OF_EVERY_METHOD: Mapping[str, Any] = MappingProxyType(
    {"interval": 1, "pinned": (), "chunk": 1, **NO_MERGING, **NO_WIDTHS, "codebooks": None}
)
"""Settings that are added to a factory that does not take them, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A factory, by a name, and facts of it that its arguments alone do not tell.

    The arguments of the factory are keywords with defaults, `budget` among them. Those that are no calibrated array and
    no place are the method's settings.

    Raises:
        ValueError: a fact names an argument that the factory does not take.
    """

    name: str | None
    """That of the Evictions that it makes. None, for a factory that is not registered: they may have any."""
    factory: Callable[..., Eviction]
    calibrated: tuple[str, ...] = ()
    """The arguments that come from a calibration, arrays [H,...] of one layer: among filters, mean_keys, query_mean,
    query_cov, query_centres, weights, means, deviations, and those of `methods.learned.LEARNED`."""
    needs_calibration: bool = False
    """It can do nothing without them."""
    guesses: bool = False
    """Without them it estimates a stand-in from each text, far from as good: `install` wants calibrate=False for it."""
    fuses: bool = False
    """Its settings `terms` and `combine` say which columns of means, deviations and weights it takes, as in fusion."""
    recent: bool = False
    """It has a setting of the name `recent`, which `install` sets where the user does not."""
    window: str | None = None
    """Its own name for `recent`, as in its paper, where it has one. `make` takes either."""
    recent_share: float | None = None
    """The share of the budget that `install` sets `recent` to; None, that of most methods."""
    rollback: bool = False
    """It has the setting `rollback`: a row is scored once, so that tokens can be taken back after evictions."""
    place: tuple[str, ...] = ()
    """Those of "layer" and "first_head" that it takes: where in the whole model a cache stands."""
    rope: str | None = None
    """When it takes `rope`, the model's rotary embedding: "to renumber", with its setting renumber=True; "when read",
    without a calibration and where it can be read; "always"; None, never."""
    reads_values: bool = False
    """It scores a row by its value too, and so not where none is cached (latent attention)."""
    pools_heads: bool = False
    """It scores a row by all heads of its layer together."""

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ValueError(
                f"a factory is a function that returns an Eviction, got {type(self.factory).__name__}; to use an "
                "Eviction as it is, give it to install or EvictingKVCache"
            )
        checks.one_of("rope", self.rope, ROPES)
        if self.recent_share is not None and not (self.recent and 0 <= self.recent_share < 1):
            raise ValueError(
                f"recent_share is a share of the budget, from 0 to below 1, for a method that takes recent; got "
                f"{self.recent_share!r} with recent={self.recent}"
            )
        flags = {"recent": self.recent, "rollback": self.rollback, "rope": self.rope is not None}
        fused = ("terms", "combine") if self.fuses else ()
        windows = (self.window,) if self.window is not None else ()
        flagged = (name for name, has in flags.items() if has)
        told = ("budget", *self.calibrated, *self.place, *fused, *windows, *flagged)
        unknown = [name for name in self.place if name not in PLACES]
        if unknown:
            raise ValueError(f"place holds some of {', '.join(PLACES)}, got {', '.join(unknown)}")
        bare = [name for name, default in self.defaults.items() if default is inspect.Parameter.empty]
        if bare:
            raise ValueError(
                f"the arguments {', '.join(bare)} of the factory of {self.label} have no default; give them one, "
                "such as budget=512 or None"
            )
        lacking = [name for name in told if name not in self.defaults]
        if lacking:
            raise ValueError(
                f"the factory of {self.label} takes no argument {', '.join(lacking)}; its arguments are "
                f"{', '.join(self.defaults) or 'none'}; give it budget, and what its facts name"
            )

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or str(getattr(self.factory, "__name__", "this method"))

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The factory's arguments by name, with their defaults. A factory is asked for its signature here only."""
        parameters = inspect.signature(self.factory).parameters.values()
        named = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return MappingProxyType({one.name: one.default for one in named})

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a user may set, with defaults: every argument but the calibrated arrays and the place."""
        filled = (*self.calibrated, *self.place)
        own = {name: default for name, default in self.defaults.items() if name not in filled}
        return MappingProxyType({**own, **{name: own.get(name, default) for name, default in _OF_EVERY_METHOD.items()}})

    def own_names(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """`settings` under the factory's names: `recent` is the name of the latest rows that stay in every method.

        Raises:
            ValueError: they hold `recent` and the method's own name for it.
        """
        named = dict(settings)
        if self.window is not None and "recent" in named:
            if self.window in named:
                raise ValueError(f"recent and {self.window} are two names of one setting of {self.label}; give one")
            named[self.window] = named.pop("recent")
        return named

    def make(self, **arguments: Any) -> Eviction:
        """The Eviction with these arguments. Those of every method (`interval`, `pinned`, `chunk`, `merge`,
        `merge_seed`, `key_bits`, `value_bits`, `group_size`, `codebooks` with its arrays) may be among them also where
        the factory does not take them, and `recent` for its own name.

        Raises:
            ValueError: as the factory does; or what it returns cannot be made anew from its name and settings, as
                loading a saved cache does.
        """
        arguments = self.own_names(arguments)
        books = {name: arguments.pop(name) for name in CODEBOOKS if name in arguments}
        added = {
            name: arguments.pop(name, default)
            for name, default in _OF_EVERY_METHOD.items()
            if name not in self.defaults
        }
        if added.get("merge") and "interval" in self.defaults:  # values are merged call by call, within intervals
            added["interval"], arguments["interval"] = arguments.get("interval", self.defaults["interval"]), 1
        made = self.factory(**arguments)
        if not isinstance(made, Eviction):
            raise ValueError(f"the factory of {self.label} must return an Eviction, got {type(made).__name__}")
        if self.name not in (None, made.name):
            raise ValueError(
                f"the factory registered as {self.name!r} makes an Eviction called {made.name!r}; give both one name, "
                "by which a saved cache finds its method"
            )
        if "pinned" in added:
            made = pinning(made, added["pinned"])
        if "merge" in added:
            made = merging(made, merge=added["merge"], merge_seed=added.get("merge_seed", 0))
        if "interval" in added:
            made = at_intervals(made, added["interval"])
        if "chunk" in added:
            made = chunked(made, added["chunk"])
        made = quantised(made, **{name: value for name, value in added.items() if name in NO_WIDTHS})
        if added.get("codebooks") is not None:
            made = vector_quantised(made, codebooks=added["codebooks"], **books)
        unknown = [name for name in (*made.settings, *made.params) if name not in (*self.defaults, *added, *books)]
        if unknown:
            raise ValueError(
                f"the settings of {self.label} hold {', '.join(unknown)}, which its factory does not take: settings "
                "and params are the factory's own arguments, so that a saved cache can be made anew from them"
            )
        return made
