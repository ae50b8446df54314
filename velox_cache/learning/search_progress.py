"""A search for weights as it stands, in a file from which it goes on."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from velox_cache.file_checks import check_readable
from velox_cache.learning.fusion_candidate import Candidate


@dataclass
class SearchProgress:
    """What a search has done so far. Losses: mean KL to the full cache, nats per token."""

    best: Candidate
    identity: dict[str, Any] = field(default_factory=dict)  # what makes it this search and no other
    steps: int = 0
    equal_loss: float | None = None  # of equal weights; None before it was measured
    best_loss: float = float("inf")


def begun(file: str | os.PathLike[str] | None, identity: dict[str, Any], equal: Candidate) -> SearchProgress:
    """The search in `file`, or a new one, from equal weights, where there is none.

    Raises ValueError when the file holds another search, or none that can be gone on with.
    """
    if file is None or not Path(file).exists():
        return SearchProgress(equal, identity)
    check_readable(file)
    try:
        held = json.loads(Path(file).read_text(encoding="utf-8"))
        best = Candidate.from_plain(held["best"])
        state = SearchProgress(best, held["identity"], held["steps"], held["equal_loss"], held["best_loss"])
        numbers = [int(state.steps), float(state.best_loss), *([] if state.equal_loss is None else [state.equal_loss])]
        if state.identity == identity and not (best.is_like(equal) and all(number >= 0 for number in numbers)):
            raise ValueError("its weights or counts cannot be those of this search")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no search that can be gone on with ({error}); delete it to begin anew") from error
    if state.identity != identity:
        raise ValueError(
            f"{file} holds another search ({state.identity}, where {identity} is asked for); delete it to begin anew"
        )
    return state


def write_progress(file: str | os.PathLike[str] | None, state: SearchProgress) -> None:
    """Put the search into `file`; an interrupted write leaves an older one as it was."""
    if file is not None:
        part = Path(f"{os.fspath(file)}.{os.getpid()}.part")
        part.write_text(json.dumps({**vars(state), "best": state.best.plain()}))
        part.replace(file)
