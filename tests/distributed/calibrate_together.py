"""python calibrate_together.py FOLDER none|texts|heads|layers ...: the calibrations that each rank ends with."""

from small_models import CharacterTokenizer, arguments, small_model

from velox_cache import calibrate, save_calibration, sign_agreement
from velox_cache.calibration import losses_together, passages, row_losses
from velox_cache.distributed.collectives import world

TEXTS = [f"text {n}: " + "some words of it, " * (4 + 3 * n) for n in range(4)]

# These texts are too short for losses otherwise, and their smallest shares would be no row.
passages.N_LATER, passages.LEAST_CONTEXT, passages.N_CONTEXT = 32, 64, 128
row_losses.SHARES = losses_together.SHARES = (1 / 8, 1 / 4, 1 / 2)

rank, folder, *spreads = arguments()
for spread in spreads:
    model = small_model(spread)
    for n_texts in (1, 4):
        calibration = calibrate(
            model,
            CharacterTokenizer(),
            TEXTS[:n_texts],
            sequence_length=100,
            progress=False,
            losses=True,
            codebooks=4,
            group=world() if spread == "texts" else None,
        )
        save_calibration(calibration, f"{folder}/{spread}_{n_texts}_{rank}.npz")
    assert sign_agreement(calibration, model, CharacterTokenizer(), TEXTS[0]) > 0.9, spread
