"""The options that say how rows are stored."""

import pytest

from velox_cache.cli.main import argument_parser
from velox_cache.cli.method_arguments import method_settings


def settings_of(*options: str) -> dict[str, object]:
    return method_settings(argument_parser("generate").parse_args(["generate", "MODEL", "--prompt", "x", *options]))


def test_one_option_stands_for_keys_and_values() -> None:
    assert settings_of("--kv-bits", "8") == {"key_bits": 8, "value_bits": 8}


def test_keys_and_values_may_differ() -> None:
    given = settings_of("--key-bits", "8", "--value-bits", "4", "--kv-group-size", "32")
    assert given == {"key_bits": 8, "value_bits": 4, "group_size": 32}


def test_rows_stay_as_they_come_by_default() -> None:
    assert settings_of() == {}


def test_both_forms_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="--kv-bits is --key-bits and --value-bits in one"):
        settings_of("--kv-bits", "8", "--key-bits", "4")
