"""Progress as lines on stderr, which show where there is no terminal too."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def told_progress(total: int, every: float = 3.0, shown: bool = True) -> Iterator[Callable[[str, int], None]]:
    """A function that takes what is being done and how much of `total` was done since its last call.

    Every few seconds, whether or not it was called, a line says what, how far, and how long still: on a terminal in
    place of the last one, elsewhere below it.
    """
    if not shown:
        yield lambda now_doing, amount: None
        return
    began, what, done = time.monotonic(), "starting", 0
    over = threading.Event()
    start, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")

    def report(now_doing: str, amount: int) -> None:
        nonlocal what, done
        what, done = now_doing, done + amount

    def tell() -> None:
        while not over.wait(every):
            line = progress_line(what, done / total, time.monotonic() - began)
            print(start + line, end=end, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield report
    finally:
        over.set()
        teller.join()
        print(start, end="", file=sys.stderr, flush=True)


def progress_line(what: str, share: float, seconds: float) -> str:
    """What is being done, the share that is done, and how long it takes still, at the pace so far."""
    left = f"about {seconds * (1 - share) / share:.0f} s left" if share > 0 else f"{seconds:.0f} s so far"
    return f"{what}: {min(share, 1):.0%} of all, {left}"
