"""Cells of `velox compare` depend on those arrays of a calibration that their method takes."""

from velox_cache import calibrate
from velox_cache.evaluation.compare import Contender
from velox_cache.harness.arms import FULL, cache_maker, parse_arm

TEXT = "The cache holds what attention will read again, and nothing that it will not. " * 4


def test_an_arm_knows_the_calibration_that_it_takes_and_no_other(tiny_model, tokenizer):
    model = tiny_model()
    prints = {"learned": [], "qfilters": [], "streaming_llm": []}
    for target in ("natural", "repeated", "natural"):
        made = calibrate(model, tokenizer, [TEXT], progress=False, learned_target=target)
        for method, found in prints.items():
            arm = parse_arm(method, 32, 8)
            found.append(Contender(arm, cache_maker(model, arm, made)).calibrated)
    assert prints["learned"][0] == prints["learned"][2] != prints["learned"][1]
    assert len(set(prints["qfilters"])) == 1
    assert prints["qfilters"][0]
    assert prints["streaming_llm"] == ["", "", ""]
    assert Contender(FULL, cache_maker(model, FULL)).calibrated == ""
