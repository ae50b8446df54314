"""The methods by name: registering one here is all it takes to be tested, listed and offered everywhere."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from velox_fn.engine.eviction import Eviction
from velox_fn.methods.cur import cur
from velox_fn.methods.curdkv import curdkv
from velox_fn.methods.expected_attention import expected_attention
from velox_fn.methods.fusion import fusion
from velox_fn.methods.h2o import h2o
from velox_fn.methods.keydiff import keydiff
from velox_fn.methods.l2norm import l2norm
from velox_fn.methods.qfilters import qfilters
from velox_fn.methods.random_eviction import random_eviction
from velox_fn.methods.snapkv import snapkv
from velox_fn.methods.streaming_llm import streaming_llm
from velox_fn.methods.tova import tova

METHODS: Mapping[str, Callable[..., Eviction]] = MappingProxyType(
    {
        "qfilters": qfilters,
        "fusion": fusion,
        "curdkv": curdkv,
        "h2o": h2o,
        "tova": tova,
        "snapkv": snapkv,
        "cur": cur,
        "l2norm": l2norm,
        "keydiff": keydiff,
        "expected_attention": expected_attention,
        "streaming_llm": streaming_llm,
        "random": random_eviction,
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"knorm": "l2norm"})


def method_factory(name: str) -> Callable[..., Eviction]:
    """The factory of the method of this name or alias. Raises ValueError that lists the known ones."""
    factory = METHODS.get(ALIASES.get(name, name))
    if factory is None:
        raise ValueError(f"there is no method {name!r}; the methods are {', '.join(METHODS)}")
    return factory
