"""The laws that every method keeps, as functions to run on a method of one's own.

    from velox_fn.testing import check_method
    check_method(my_method(budget=16))

A law takes an Eviction and the layer to try it on, and raises AssertionError that says what does not hold. The budget
should be small: blocks of a few times as many tokens are tried. This package's own tests run the same functions. What
they look at is copied to the host, so this is no part of a model's run.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from velox_fn.engine.eviction import Eviction
from velox_fn.testing.cuts import (
    a_batch_keeps_what_its_sequences_keep_alone,
    padding_is_never_kept,
    the_kept_set_of_a_static_method_does_not_depend_on_the_calls,
    valid_that_counts_every_token_changes_nothing,
)
from velox_fn.testing.rows import (
    a_block_sees_what_was_kept_and_itself,
    accounting_counts_kept_rows,
    kept_rows_are_tokens_in_order,
    rows_that_are_not_finite_lose,
    sinks_and_recent_rows_stay,
    the_budget_holds,
    the_dtype_stays,
    the_offset_counts_tokens,
    ties_do_not_change_the_number,
)
from velox_fn.testing.states import (
    a_compiled_step_serves_the_next_ones,
    a_state_can_be_forked,
    an_update_traces,
    nothing_is_left_unevaluated,
    states_are_records,
)
from velox_fn.testing.trials import DTYPES, LAYER, Layer, Tokens, bits, block, fed, operations, positions, same_kept

Law = Callable[[Eviction, Layer], None]
LAWS: Mapping[str, Law] = MappingProxyType(
    {
        law.__name__: law
        for law in (
            states_are_records,
            the_budget_holds,
            the_offset_counts_tokens,
            kept_rows_are_tokens_in_order,
            the_dtype_stays,
            sinks_and_recent_rows_stay,
            a_block_sees_what_was_kept_and_itself,
            a_state_can_be_forked,
            an_update_traces,
            a_compiled_step_serves_the_next_ones,
            nothing_is_left_unevaluated,
            rows_that_are_not_finite_lose,
            ties_do_not_change_the_number,
            padding_is_never_kept,
            valid_that_counts_every_token_changes_nothing,
            a_batch_keeps_what_its_sequences_keep_alone,
            accounting_counts_kept_rows,
            the_kept_set_of_a_static_method_does_not_depend_on_the_calls,
        )
    }
)
"""The laws by name."""


def check_method(method: Eviction, layer: Layer = LAYER) -> None:
    """Run every law. Raises AssertionError that names the first one broken, ValueError for a method at intervals."""
    if method.settings.get("interval", 1) != 1:
        raise ValueError(
            f"the laws are those of a method that evicts with every call, got interval={method.settings['interval']}; "
            "at_intervals adds the rest, and is tested itself: give the method with interval=1"
        )
    for name, law in LAWS.items():
        try:
            law(method, layer)
        except AssertionError as error:
            raise AssertionError(f"{method.name} breaks the law {name}: {error}") from error


__all__ = [
    "DTYPES",
    "LAWS",
    "LAYER",
    "Law",
    "Layer",
    "Tokens",
    "a_batch_keeps_what_its_sequences_keep_alone",
    "a_block_sees_what_was_kept_and_itself",
    "a_compiled_step_serves_the_next_ones",
    "a_state_can_be_forked",
    "accounting_counts_kept_rows",
    "an_update_traces",
    "bits",
    "block",
    "check_method",
    "fed",
    "kept_rows_are_tokens_in_order",
    "nothing_is_left_unevaluated",
    "operations",
    "padding_is_never_kept",
    "positions",
    "rows_that_are_not_finite_lose",
    "same_kept",
    "sinks_and_recent_rows_stay",
    "states_are_records",
    "the_budget_holds",
    "the_dtype_stays",
    "the_kept_set_of_a_static_method_does_not_depend_on_the_calls",
    "the_offset_counts_tokens",
    "ties_do_not_change_the_number",
    "valid_that_counts_every_token_changes_nothing",
]
