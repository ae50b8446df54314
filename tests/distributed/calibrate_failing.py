"""python calibrate_failing.py killed|raised: a calibration of which rank 1 meets its end."""

import os
import signal

from small_models import CharacterTokenizer, arguments, small_model

from velox_cache import calibrate, calibration
from velox_cache.distributed import world

rank, how = arguments()


def fail(*anything: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank is out of paper")


if rank == 1:
    calibration.observed_prefill = fail
calibrate(
    small_model("none"),
    CharacterTokenizer(),
    ["some words of it, " * 20] * 3,
    progress=False,
    group=world(),
)
