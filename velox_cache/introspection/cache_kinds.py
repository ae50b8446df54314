"""What kind of cache a model made for a layer, told by its form, since packages carry copies of mlx_lm's classes."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache

_CALLED_BY_MODELS = ("update_and_fetch", "make_mask", "state", "is_trimmable", "trim")


def is_plain(cache: Any) -> bool:
    """Whether a cache keeps every row of full attention: mlx_lm's KVCache, or another package's copy of it (mlx_vlm).

    A copy has the same name, is called alike and holds keys, values and offset alone, which leaves no room for a
    window, for chunks or for quantisation. Subclasses under another name are not plain.
    """
    if type(cache) is KVCache:
        return True
    held = getattr(cache, "__dict__", {}).keys()
    return (
        type(cache).__name__ == "KVCache"
        and held == vars(KVCache()).keys()
        and all(hasattr(type(cache), name) for name in _CALLED_BY_MODELS)
    )


def is_list(cache: Any) -> bool:
    """Whether a cache is a CacheList, of any package: several caches of one layer, in `caches`."""
    return any(cls.__name__ == "CacheList" for cls in type(cache).__mro__)


def parts(cache: Any) -> list[Any]:
    """The caches of one layer: those inside a CacheList, or the one."""
    return list(cache.caches) if is_list(cache) else [cache]


def with_parts(cache: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a cache; where it is a CacheList, a list of the same class with `change` of each part."""
    return type(cache)(*(with_parts(part, change) for part in cache.caches)) if is_list(cache) else change(cache)


def class_name(cache: Any) -> str:
    """The class with its module, as an error shows it."""
    return f"{type(cache).__module__}.{type(cache).__qualname__}"
