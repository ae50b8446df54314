"""python compare_together.py FOLDER one|each N_SUBJECTS [VICTIM]: a comparison of nothing, shared out.

Results go to FOLDER, or to a folder in it for each rank; what rank R ran stands in FOLDER/ran_R. The rank VICTIM is
killed at its second measurement.
"""

import json
import os
import signal
from pathlib import Path

from small_models import arguments

from velox_cache.distributed.collectives import world
from velox_cache.evaluation.cells import Cells
from velox_cache.evaluation.compare import Contender, Measurement, compare
from velox_cache.harness.arms import FULL, Arm

rank, folder, folders, n_subjects, *victims = arguments()
ran = Path(folder) / f"ran_{rank}"
cells = Cells(Path(folder) / ("cells" if folders == "one" else f"cells_{rank}"), {})


def measurement(subject: str) -> Measurement:
    def run(contenders, advance):
        with ran.open("a") as log:
            print(subject, file=log)
        if str(rank) in victims and len(ran.read_text().split()) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"value": f"{subject} {one.arm.label}"} for one in contenders]

    return Measurement("nothing", subject, 0, {}, 10, run)


measurements = [measurement(f"subject-{n}") for n in range(int(n_subjects))]
contenders = [Contender(arm, list) for arm in (FULL, Arm("a", "l2norm", {"budget": 8}))]
rows = compare(measurements, contenders, cells, group=world())
(Path(folder) / f"rows_{rank}.json").write_text(json.dumps([row.values["value"] for row in rows]))
