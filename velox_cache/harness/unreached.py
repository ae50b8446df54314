"""Comparisons of caches that never evicted."""

import warnings
from collections.abc import Sequence


def warn_where_nothing_leaves(most_rows: Sequence[int], n_tokens: int) -> None:
    """Warn when caches of these most rows hold all `n_tokens`: arms that are all the full cache compare nothing.

    Python shows a warning of the same words once in a run. Nothing is said of no caches.
    """
    if most_rows and min(most_rows) >= n_tokens:
        warnings.warn(
            f"no budget is reached: {n_tokens} tokens are read, and every arm has room for all of them, so each is the "
            "full cache and no method is compared; read more tokens, or take a smaller budget",
            stacklevel=2,
        )
