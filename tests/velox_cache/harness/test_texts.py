"""Texts to read."""

import pytest

from velox_cache.harness.texts import TEXTS, passages, text_named


def test_passages_are_spread_from_first_to_last():
    assert passages(list(range(10)), 4, 2) == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert passages(list(range(10)), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="do not fit"):
        passages(list(range(10)), 10, 2)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_there(name):
    assert len(text_named(name)) > 5000


def test_a_text_may_be_a_file(tmp_path):
    (tmp_path / "own.txt").write_text("my text")
    assert text_named(str(tmp_path / "own.txt")) == "my text"
    with pytest.raises(ValueError, match="documentation, licence, code"):
        text_named("nothing")
