"""Whether the installed mlx_lm speaks with its caches as ours answer; it changes that between minor versions."""

from importlib.metadata import version
from types import ModuleType

import mlx_lm.models.cache

from velox_cache.caches.evicting import EvictingKVCache

TESTED = "mlx-lm>=0.32.2,<0.33"
_OF_PLAIN_CACHES = ("step", "to_quantized")
_NEEDED = {  # what we call of theirs
    "KVCache": ("update_and_fetch", "keys_and_values", "make_mask", "state", "from_state", "nbytes", "merge", "trim"),
    "BatchKVCache": ("prepare", "finalize", "extract", "extend", "filter"),
}


def protocol_faults(caches: ModuleType = mlx_lm.models.cache) -> tuple[str, ...]:
    """In words, what mlx_lm's caches have that evicting ones lack, and what we need that they lack; () if all fits."""
    kinds = [vars(caches)[name] for name in ("_BaseCache", *_NEEDED) if name in vars(caches)]
    theirs = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    unanswered = sorted(name for name in theirs - {*_OF_PLAIN_CACHES} if not hasattr(EvictingKVCache, name))
    faults = [f"its caches have {name}, which evicting caches do not" for name in unanswered]
    for kind, names in _NEEDED.items():
        found = vars(caches).get(kind)
        lacking = [name for name in names if not hasattr(found, name)]
        faults += [f"its {kind} has no {name}" for name in lacking] if found else [f"it has no {kind}"]
    return tuple(faults)


def check_protocol() -> None:
    """Raise RuntimeError, with words, when evicting caches cannot work with the installed mlx_lm."""
    if faults := protocol_faults():
        raise RuntimeError(
            f"the installed mlx-lm {version('mlx-lm')} speaks another cache protocol than velox-kv: "
            f"{'; '.join(faults)}. Install one that was tested: pip install '{TESTED}'"
        )
