"""Text from stdin, for the options that take `-`."""

import sys

from velox_cache.distributed.launcher import refuse_stdin


def text_from_stdin(option: str) -> str:
    """All of stdin. Raises ValueError under a launcher, and when it is not UTF-8 text."""
    refuse_stdin(option)
    try:
        return sys.stdin.buffer.read().decode("utf-8")  # whatever the locale
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: stdin is not UTF-8 text: {error}") from error
