"""python calibrate_failing.py killed|raised|other-texts: a calibration in which something is wrong with rank 1."""

import os
import signal

from small_models import CharacterTokenizer, arguments, small_model

from velox_cache import calibrate
from velox_cache.calibration import calibrating as calibration
from velox_cache.distributed.collectives import world

rank, how = arguments()


def fail(*anything: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank is out of paper")


texts = ["some words of it, " * 20] * 3
if rank == 1 and how == "other-texts":
    texts.append("words that no other rank was given")
elif rank == 1:
    calibration.observed_prefill = fail
calibrate(
    small_model("none"),
    CharacterTokenizer(),
    texts,
    progress=False,
    group=world(),
)
