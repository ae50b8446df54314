"""Filters survive the file, and a file that cannot be trusted is refused with its reason."""

import dataclasses
import json
import zipfile

import mlx.core as mx
import numpy as np
import pytest

from velox_cache.calibration.artifact import Calibration, import_published_filters, load_calibration, save_calibration
from velox_cache.calibration.score_choice import ScoreChoice
from velox_cache.calibration.statistics import LayerStatistics


@pytest.fixture
def calibration():
    filters = [mx.random.normal((2, 8), key=mx.random.key(i)) for i in range(3)]
    return Calibration(
        [filters[0], None, filters[2]],
        model_id="some/model",
        n_samples=3000,
        dataset="a dataset",
        n_tokens=3000,
        layer_layout=("KVCache", "RotatingKVCache", "CacheList(ArraysCache, KVCache)"),
    )


@pytest.fixture
def statistics():
    def layer(seed):
        keys = mx.random.split(mx.random.key(seed), 3)
        shapes = [(2, 8), (2, 8), (2, 8, 8)]
        return LayerStatistics(*(mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)))

    return (layer(7), None, layer(8))


@pytest.fixture
def path(calibration, tmp_path):
    save_calibration(calibration, tmp_path / "calibration.npz")
    return tmp_path / "calibration.npz"


def rewrite(path, **changes):
    """The same .npz with members replaced, or dropped where the change is None; pickles are written as such."""
    with np.load(path) as content:
        members = {name: content[name] for name in content.files} | changes
    np.savez(path, **{name: member for name, member in members.items() if member is not None})


def rewrite_header(path, **changes):
    with np.load(path) as content:
        header = json.loads(str(content["header"])) | changes
    rewrite(path, header=np.array(json.dumps(header)))


def test_round_trip_keeps_every_field(calibration, path):
    loaded = load_calibration(path)
    for field in dataclasses.fields(Calibration):
        if field.name != "filters":
            assert getattr(loaded, field.name) == getattr(calibration, field.name)


def test_round_trip_keeps_filters_bit_for_bit(calibration, path):
    loaded = load_calibration(path, expect_model_id="some/model")
    assert [f is None for f in loaded.filters] == [False, True, False]
    assert mx.array_equal(loaded.filters[0], calibration.filters[0]).item()
    assert mx.array_equal(loaded.filters[2], calibration.filters[2]).item()


def test_file_is_written_under_the_given_name(calibration, tmp_path):
    save_calibration(calibration, str(tmp_path / "named.filters"))
    assert [file.name for file in tmp_path.iterdir()] == ["named.filters"]


def test_interrupted_write_leaves_the_older_file(calibration, path, monkeypatch):
    before = path.read_bytes()

    def interrupted(file, **members):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_calibration(calibration, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_folder_is_named(calibration, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere for calibration\.npz does not exist"):
        save_calibration(calibration, tmp_path / "nowhere" / "calibration.npz")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        load_calibration(tmp_path / "absent.npz")


def test_wrong_model_is_refused(path):
    with pytest.raises(ValueError, match="calibrated for model 'some/model', not 'other/model'"):
        load_calibration(path, expect_model_id="other/model")


@pytest.mark.parametrize("kept", [0, 1, 40, 300, -1, -30])
def test_truncated_file_is_refused(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="truncated"):
        load_calibration(path)


def test_damaged_content_is_refused(path):
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("filter_0000.npy").header_offset
    content[start + 190] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged"):
        load_calibration(path)


def test_file_that_is_no_npz_is_refused(path):
    np.save(path.with_suffix(".npy"), np.zeros(3))
    with pytest.raises(ValueError, match=r"not an \.npz"):
        load_calibration(path.with_suffix(".npy"))


def test_npz_of_something_else_is_refused(path):
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match="not a calibration"):
        load_calibration(path)


def test_pickled_objects_are_never_read(path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    rewrite(path, filter_0000=np.array([Trap()], dtype=object))
    with pytest.raises(ValueError, match="not a plain array"):
        load_calibration(path)


@pytest.mark.parametrize("version", [0, 5, 99])
def test_unknown_version_is_refused(path, version):
    rewrite(path, format_version=np.int64(version))
    with pytest.raises(ValueError, match=f"format version is {version}"):
        load_calibration(path)


def test_missing_layer_is_refused(path):
    rewrite(path, filter_0002=None)
    with pytest.raises(ValueError, match=r"layers \[2\] are missing"):
        load_calibration(path)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (np.full((2, 8), np.nan, np.float32), "layer 0 is not finite"),
        (np.full((2, 8), np.inf, np.float32), "layer 0 is not finite"),
        (np.diag([1, 0]).astype(np.float32), "layer 0 holds nothing but zeros for one head"),
        (np.zeros(8, np.float32), "layer 0 must be"),
        (np.zeros((0, 8), np.float32), "layer 0 must be"),
        (np.zeros((2, 8), np.float16), "layer 0 must be float32"),
        (np.zeros((2, 8), np.int64), "layer 0 must be float32"),
    ],
)
def test_stored_filter_that_cannot_be_used_is_refused(path, stored, message):
    rewrite(path, filter_0000=stored)
    with pytest.raises(ValueError, match=message):
        load_calibration(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"basis": "pre-rope"}, "post-rope"),
        ({"sign_convention": "lower projection = keep"}, "negate"),
        ({"layer_layout": ["KVCache"]}, "layer_layout names 1 layers"),
        ({"has_filter": 3}, "cannot be used"),
        ({"something_new": 3}, "something_new"),
    ],
)
def test_header_that_cannot_be_trusted_is_refused(path, change, message):
    rewrite_header(path, **change)
    with pytest.raises(ValueError, match=message):
        load_calibration(path)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([], "at least one layer"),
        ([None, None], "at least one layer"),
        ([mx.zeros((8,))], "layer 0 must be"),
        ([None, mx.zeros((2, 8), mx.float16)], "layer 1 must be"),
        ([np.zeros((2, 8), np.float32)], "layer 0 must be"),
        ([mx.full((2, 8), float("nan"))], "layer 0 is not finite"),
    ],
)
def test_calibration_of_unusable_filters_is_refused(filters, message):
    with pytest.raises(ValueError, match=message):
        Calibration(filters)


def test_calibration_takes_filters_by_position_as_a_list():
    calibration = Calibration([mx.ones((2, 8))], model_id="m", n_samples=3000, dataset="d")
    assert (len(calibration.filters), calibration.basis) == (1, "post-rope")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_published_filters_are_imported_with_the_sign_turned(tmp_path, dtype):
    published = mx.random.normal((3, 2, 8), key=mx.random.key(5)).astype(dtype)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"q_filters": published})
    imported = import_published_filters(tmp_path / "model.safetensors", model_id="some/model")
    assert imported.model_id == "some/model"
    assert [f.dtype for f in imported.filters] == [mx.float32] * 3
    assert mx.array_equal(mx.stack(list(imported.filters)), -published.astype(mx.float32)).item()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"q_filters": mx.zeros((2, 8))}, r"\[layers, kv heads, head_dim\]"),
        ({"a": mx.zeros((3, 2, 8)), "b": mx.zeros((3, 2, 8))}, "must hold one tensor"),
        ({"q_filters": mx.full((3, 2, 8), float("nan"))}, "layer 0 is not finite"),
    ],
)
def test_other_safetensors_are_refused(tmp_path, tensors, message):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(ValueError, match=message):
        import_published_filters(tmp_path / "model.safetensors")


def test_import_of_another_file_format_is_refused(path):
    with pytest.raises(ValueError, match=r"not a readable \.safetensors"):
        import_published_filters(path)


def test_import_of_a_missing_file_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        import_published_filters(tmp_path / "absent.safetensors")


def test_round_trip_keeps_statistics_bit_for_bit(calibration, statistics, tmp_path):
    save_calibration(dataclasses.replace(calibration, statistics=statistics), tmp_path / "calibration.npz")
    loaded = load_calibration(tmp_path / "calibration.npz").statistics
    assert [layer is None for layer in loaded] == [False, True, False]
    for name, array in statistics[2].arrays().items():
        assert mx.array_equal(getattr(loaded[2], name), array).item()


def test_file_of_the_first_version_still_loads(calibration, path):
    with np.load(path) as content:
        header = json.loads(str(content["header"]))
    del header["has_statistics"]
    rewrite(path, format_version=np.int64(1), header=np.array(json.dumps(header)))
    loaded = load_calibration(path)
    assert (loaded.format_version, loaded.statistics) == (1, ())
    assert mx.array_equal(loaded.filters[0], calibration.filters[0]).item()


@pytest.fixture
def with_moments(calibration, statistics):
    def layer(own, seed):
        means, deviations = (mx.random.normal((2, 3), key=mx.random.key(seed + i)) for i in range(2))
        return dataclasses.replace(own, term_means=means, term_deviations=mx.abs(deviations))

    statistics = [None if own is None else layer(own, i) for i, own in enumerate(statistics)]
    return dataclasses.replace(calibration, statistics=statistics, terms=("projection", "key_norm", "recency"))


def test_round_trip_keeps_moments_and_their_names(with_moments, tmp_path):
    save_calibration(with_moments, tmp_path / "calibration.npz")
    loaded = load_calibration(tmp_path / "calibration.npz")
    assert (loaded.format_version, loaded.terms) == (4, ("projection", "key_norm", "recency"))
    for name in ("term_means", "term_deviations"):
        assert mx.array_equal(getattr(loaded.statistics[2], name), getattr(with_moments.statistics[2], name)).item()


@pytest.mark.parametrize("name", ["term_means", "term_deviations"])
def test_missing_moments_are_noticed(with_moments, tmp_path, name):
    save_calibration(with_moments, tmp_path / "calibration.npz")
    rewrite(tmp_path / "calibration.npz", **{f"{name}_0002": None})
    with pytest.raises(ValueError, match=f"{name}_0002"):
        load_calibration(tmp_path / "calibration.npz")


def test_file_of_the_second_version_still_loads(calibration, statistics, tmp_path):
    path = tmp_path / "calibration.npz"
    save_calibration(dataclasses.replace(calibration, statistics=statistics), path)
    with np.load(path) as content:
        header = json.loads(str(content["header"]))
    del header["terms"], header["fusion"], header["scores"]
    rewrite(path, format_version=np.int64(2), header=np.array(json.dumps(header)))
    loaded = load_calibration(path)
    assert (loaded.format_version, loaded.terms, loaded.fusion) == (2, (), None)
    assert mx.array_equal(loaded.statistics[2].mean_keys, statistics[2].mean_keys).item()
    assert loaded.statistics[2].term_means is None


SCORES = {
    "score_keys": (2, 8),
    "score_key_squares": (2, 8),
    "score_values": (2, 6),
    "score_value_squares": (2, 6),
    "score_age": (2,),
    "score_correlation": (2,),
}


@pytest.fixture
def with_scores(with_moments):
    def layer(own, seed):
        keys = [mx.random.key(seed + i) for i in range(len(SCORES))]
        arrays = {
            name: mx.random.normal(shape, key=key) for key, (name, shape) in zip(keys, SCORES.items(), strict=True)
        }
        return dataclasses.replace(own, **arrays)

    statistics = [None if own is None else layer(own, i) for i, own in enumerate(with_moments.statistics)]
    return dataclasses.replace(with_moments, statistics=statistics, scores=ScoreChoice("keys+values", 0.1))


def test_round_trip_keeps_learned_scores_and_how_they_were_fitted(with_scores, tmp_path):
    save_calibration(with_scores, tmp_path / "calibration.npz")
    loaded = load_calibration(tmp_path / "calibration.npz")
    assert loaded.scores == with_scores.scores
    for name in SCORES:
        assert mx.array_equal(getattr(loaded.statistics[2], name), getattr(with_scores.statistics[2], name)).item()


def test_file_of_the_third_version_still_loads(with_moments, tmp_path):
    path = tmp_path / "calibration.npz"
    save_calibration(with_moments, path)
    with np.load(path) as content:
        header = json.loads(str(content["header"]))
    del header["scores"]
    rewrite(path, format_version=np.int64(3), header=np.array(json.dumps(header)))
    loaded = load_calibration(path)
    assert (loaded.format_version, loaded.scores, loaded.terms) == (3, None, with_moments.terms)
    assert loaded.statistics[2].score_keys is None


@pytest.mark.parametrize("name", SCORES)
def test_missing_scores_are_noticed(with_scores, tmp_path, name):
    save_calibration(with_scores, tmp_path / "calibration.npz")
    rewrite(tmp_path / "calibration.npz", **{f"{name}_0002": None})
    with pytest.raises(ValueError, match=f"{name}_0002"):
        load_calibration(tmp_path / "calibration.npz")
    with pytest.raises(ValueError, match=r"score_keys.* must all be there"):
        dataclasses.replace(with_scores.statistics[2], **{name: None})


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_another_shape_are_refused(with_scores, name):
    other = mx.zeros((3, *SCORES[name][1:]))
    with pytest.raises(ValueError, match=r"score_keys.* must all be there"):
        dataclasses.replace(with_scores.statistics[2], **{name: other})


def test_scores_without_how_they_were_fitted_are_refused(with_scores):
    with pytest.raises(ValueError, match="layer 0 must have learned scores where"):
        dataclasses.replace(with_scores, scores=None)


@pytest.mark.parametrize("given", [("values", 0.1), ("keys", 0.0)], ids=str)
def test_a_fit_that_cannot_be_is_refused(given):
    with pytest.raises(ValueError, match="a learned score is fitted to"):
        ScoreChoice(*given)


def test_moments_of_another_number_of_terms_are_refused(with_moments):
    with pytest.raises(ValueError, match=r"terms names 2 static scores .* but layer 0 has the moments of 3"):
        dataclasses.replace(with_moments, terms=("projection", "key_norm"))


def test_means_without_deviations_are_refused():
    with pytest.raises(ValueError, match="term_means and term_deviations must both be"):
        LayerStatistics(mx.zeros((2, 8)), mx.zeros((2, 8)), mx.zeros((2, 8, 8)), term_means=mx.zeros((2, 3)))


@pytest.mark.parametrize("name", ["mean_keys", "query_mean", "query_cov"])
def test_missing_statistics_are_noticed(calibration, statistics, tmp_path, name):
    path = tmp_path / "calibration.npz"
    save_calibration(dataclasses.replace(calibration, statistics=statistics), path)
    rewrite(path, **{f"{name}_0002": None})
    with pytest.raises(ValueError, match=f"{name}_0002"):
        load_calibration(path)


def test_statistics_of_another_number_of_layers_are_refused(calibration, statistics):
    with pytest.raises(ValueError, match="statistics has 2 entries but filters has 3"):
        dataclasses.replace(calibration, statistics=statistics[:2])


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 7), (1, 8, 8)])
def test_statistics_that_do_not_fit_each_other_are_refused(shape):
    with pytest.raises(ValueError, match="query_cov"):
        LayerStatistics(mx.zeros((2, 8)), mx.zeros((2, 8)), mx.zeros(shape))


def test_statistics_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="query_mean must be finite"):
        LayerStatistics(mx.zeros((2, 8)), mx.full((2, 8), mx.nan), mx.zeros((2, 8, 8)))


@pytest.mark.parametrize("name", ["mean_keys_0000", "query_cov_0000", "term_means_0000"])
@pytest.mark.parametrize(
    "stored", [np.array(["a", "b"]), np.ones((2, 8)), np.ones((2, 8), bool)], ids=lambda a: a.dtype
)
def test_stored_statistics_that_are_no_float32_are_refused(path, with_moments, name, stored):
    save_calibration(with_moments, path)
    rewrite(path, **{name: stored})
    with pytest.raises(ValueError, match=f"{name[:-5]} of layer 0 must be float32, got {stored.dtype}"):
        load_calibration(path)


@pytest.mark.parametrize("member", ["mean_keys_0000", "term_means_0000"])
def test_stored_statistics_without_dimensions_are_refused(path, with_moments, member):
    save_calibration(with_moments, path)
    rewrite(path, **{member: np.float32(1)})
    with pytest.raises(ValueError, match="cannot be used"):
        load_calibration(path)


@pytest.mark.parametrize("header", ["3", "[]", '"text"', "null"])
def test_a_header_that_is_no_mapping_is_refused(path, header):
    rewrite(path, header=np.array(header))
    with pytest.raises(ValueError, match=r"cannot be used|is not a calibration"):
        load_calibration(path)
