"""Put evicting caches into a model, so that everything in mlx_lm that asks it for caches gets them."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.mlx_lm_protocol import check_protocol
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.default_recent import RECENT_SHARE, with_default_recent
from velox_cache.calibration.made_once import about
from velox_cache.calibration.row_losses import METHODS as LOSSES_OF
from velox_cache.calibration.values_read import check_values_read, default_terms, why_left_out
from velox_cache.installation.asked import check_asked, check_settings
from velox_cache.installation.footprint import footprint
from velox_cache.installation.given_calibration import GivenCalibration, calibration_of, one_of_both
from velox_cache.installation.installed import InstalledCaches
from velox_cache.installation.layer_arguments import check_queries_together
from velox_cache.installation.layer_budgets import Budgets, with_own_masks
from velox_cache.installation.layer_methods import by_layer, has_own_budgets, of_every_layer
from velox_cache.installation.own_attention import IN_TIERS, QUANTISED, check_reads, reads_tiers, tap_of
from velox_cache.installation.own_masks import look_up_masks, take_masks_as_given
from velox_cache.installation.parts import call_in_parts, call_whole
from velox_cache.installation.report import InstallReport
from velox_cache.installation.shares import (
    CALIBRATED,
    about_shares,
    check_has_losses,
    check_shares,
    rule_by_itself,
    shared_out,
)
from velox_cache.installation.storage_settings import both_widths
from velox_cache.installation.tapped import check_shows_queries
from velox_cache.installation.tiers import settings_of
from velox_cache.introspection.mlx_vlm_models import check_can_be_called_in_parts, check_takes_caches
from velox_cache.introspection.plan import plan_layers
from velox_cache.introspection.row_bytes import row_bytes
from velox_cache.introspection.shard import model_shard
from velox_cache.known_methods import as_method
from velox_cache.recommended import AUTO, RECOMMENDED_METHOD
from velox_fn.engine import checks
from velox_fn.engine.eviction import Eviction
from velox_fn.engine.quantised import NO_WIDTHS
from velox_fn.method import Method


def install(
    model: nn.Module,
    method: str | Method | Eviction | Callable[..., Eviction] = RECOMMENDED_METHOD,
    *,
    budget: int | Budgets | None = None,
    shares: str | None = AUTO,
    calibration: GivenCalibration | None = None,
    calibrate: bool | str = "auto",
    tokenizer: Tokenizer | None = None,
    queries: str = "true",
    snapshots: int = 0,
    bits: int | None = None,
    group: mx.distributed.Group | None = None,
    filters: GivenCalibration | None = None,
    **settings: Any,
) -> InstallReport:
    """Make `model` use evicting caches wherever mlx_lm asks it for a prompt cache.

    method: its name, one of `velox methods` or registered by `velox_fn.register`; its factory, such as
    `velox_fn.qfilters` or one of your own; or an Eviction, which every layer then runs as it is, so that it takes no
    budget, calibration or settings here.
    budget: most rows kept per KV head; a list with one number per layer, or a function of the layer's index, gives each
    layer its own (`layer_budgets`), and a list in a number's place each KV head of the layer.
    shares: a rule by which one budget is shared out, so that it holds on average: "calibrated" (each KV head has what
    brings the least loss, as the calibration measured it, `calibrated_head_budgets`), "calibrated-layers" (each layer,
    `calibrated_budgets`), "pyramid" (fewer rows with depth, `pyramid_budgets`) or "squeeze" (fewer where a layer
    changes little, `squeeze_budgets`, on text that comes with Python). None: all have `budget` rows. "auto", the
    default: as "calibrated" where the calibration holds losses of the method, and the model's attention can be tapped
    and has several KV heads, else as None. A `recent` that is given is that of a layer with `budget` rows; others have
    theirs in proportion. A window that a method has another name for, such as h2o's grace or snapkv's obs_window, is
    the same in all layers and must fit the smallest.
    settings: the other arguments of the method's factory, such as n_sink, recent. `recent` defaults to three quarters
    of the budget here: of the shares tried, it follows the full cache's next-token distribution best
    (docs/evaluation.md). Methods may have a share of their own: learned a half, keyformer a quarter, and a fusion the
    one that a search has found (docs/fusion.md). `terms` of a fusion default to those that the
    model's rows have something for: without the one of values on latent attention.

    calibration: what `calibrate` makes or the path of its file, for the methods that take something from it; `filters`
    is another name for it. Without it, and with calibrate="auto", a method that does not work well without one takes
    the calibration of these weights in the cache folder; where there is none yet, it is made once, with `tokenizer`, on
    text that comes with Python, and a line on stderr says where it lies. calibrate=False: none is looked for or made.

    queries: for methods that score by attention, "true" taps the model's own queries, "proxy" lets the incoming keys
    stand in.

    interval, a setting of every method: rows leave only when the tokens seen pass a multiple of it, so that what a
    token sees does not depend on how the text was cut into calls; up to budget + interval rows are held. Calls of the
    model that cross a boundary are taken apart there. snapshots: how many earlier boundaries `trim` can go back beyond;
    each takes the memory of one more cache.

    pinned, a setting of every method too: half-open ranges of positions whose rows never leave, such as [(0, 120)] for
    a system prompt of 120 tokens. They count in the budget; `recent` then defaults to its share of what they leave.
    `EvictingKVCache.pin` pins more for one sequence.
    key_bits, value_bits and group_size, settings of every method: rows are stored as `mx.quantize` makes them, and
    attention reads them so; `bits` is both in one. A static method keeps the very rows that it keeps without. Layers
    that are not bounded stay as the model made them: mlx_lm does not quantise a sliding window either. The model runs
    once more then, on three tokens, to see that its attention takes such rows.
    codebooks, a setting of every method too: rows are stored in 1, 2 or 4 bits a number by codebooks of the calibration
    (VecInfer), which `velox calibrate --codebooks` makes.

    On a model that is spread over several processes, by `model.shard(group)` or `model.model.pipeline(group)`, each of
    them installs: its caches hold its own heads and layers, with their part of `calibration`, which is the whole
    model's, as budgets per layer are. group: only for a model whose sharding cannot be seen (`model_shard`).

    Only layers with a plain full-attention cache are bounded; the report says what happened to each. A second install
    replaces the first; `uninstall` undoes it. With true queries the model runs once, on two tokens, to see that each
    bounded layer shows its queries; for a method that turns keys it runs twice more, to see how (`ModelRopes`).

    Raises ValueError when the method or a setting is unknown or cannot work, when the calibration is of other weights,
    or none is there and no tokenizer to make it with, when no layer can be bounded, or when true queries are asked for
    and the model's attention cannot be tapped; RuntimeError when the installed mlx_lm speaks another cache protocol.
    """
    check_asked(model, budget, queries, calibrate)
    check_shares(shares, budget)
    check_protocol()
    check_takes_caches(model)
    settings |= both_widths(bits, settings)
    given = one_of_both(calibration, filters)
    plan, shard = plan_layers(model), model_shard(model, group)
    if not any(entry.bounded for entry in plan) and not shard.pipelined:
        raise ValueError(f"no layer of this model can be bounded: {'; '.join({entry.reason for entry in plan})}")
    if isinstance(method, Eviction) and shares == AUTO:
        shares = None
    chosen = _chosen(method, budget=budget, calibration=given, shares=shares, **settings)
    if not any(entry.bounded for entry in plan):  # other ranks of the pipeline have the layers that can be
        return InstallReport(chosen.name if isinstance(chosen, Eviction) else chosen.label, settings, plan)
    if isinstance(chosen, Eviction):
        used, left_out, methods = None, None, of_every_layer(chosen, model, plan, shard)
    else:
        terms = default_terms(chosen, settings, model)
        settings |= terms
        left_out = why_left_out(chosen, **terms) if terms else None
        check_values_read(chosen, settings, model)
        check_has_losses(shares, model)
        one_layer = next(entry.layer for entry in plan if entry.bounded)
        anew = shares in CALIBRATED
        losses = anew or (shares == AUTO and chosen.label in LOSSES_OF)
        used = calibration_of(chosen, settings, given, calibrate, tokenizer, model, one_layer, losses=losses, anew=anew)
        if shares == AUTO:
            shares = rule_by_itself(chosen, settings, budget, used)
            shares = shares if shares is None or reads_tiers(model, plan) else None
        average = None
        if shares is not None:
            average = chosen.settings["budget"] if budget is None else checks.plain(budget)
            budget = shared_out(shares, model, chosen, settings, average, used, tokenizer)
        methods = by_layer(chosen, settings, budget, used, model, plan, shard, average=average)
    any_method = next(iter(methods.values()))[0].method
    at_intervals = any_method.settings.get("interval", 1) > 1
    if at_intervals:
        check_can_be_called_in_parts(model)
    true_queries = any_method.needs_queries and queries == "true"
    if true_queries:
        check_queries_together(shard, model)
    before = model.__dict__.get("make_cache")
    before = before.before if isinstance(before, InstalledCaches) else before
    installed = InstalledCaches(
        weakref.ref(model), plan, methods, EvictingKVCache, true_queries, None, snapshots, before
    )
    storages = {layer: [(tier.heads, tier.method.widths) for tier in tiers] for layer, tiers in methods.items()}
    quantised = [QUANTISED] if any_method.widths.packed else []
    in_tiers = [IN_TIERS] if any(len(tiers) > 1 for tiers in methods.values()) else []
    form = next(iter(quantised + in_tiers), None)
    if true_queries or form is not None:
        installed = replace(installed, tap=tap_of(model, form).install())
    if true_queries:
        check_shows_queries(model, installed)
    if form is not None:
        check_reads(model, installed, form)
    if has_own_budgets(budget):
        installed = with_own_masks(model, installed)
    uninstall(model)  # only now, so that an install that is refused leaves the one before it in place
    model.make_cache = installed.owning_tap()
    if at_intervals:
        call_in_parts(model)
    if has_own_budgets(budget):
        look_up_masks(model)
    return InstallReport(
        any_method.name,
        settings_of(methods.values()),
        plan,
        footprint(row_bytes(model), row_bytes(model, storages), methods),
        None if used is None else about(used),
        left_out,
        None if shares is None else about_shares(shares, methods.values()),
    )


def uninstall(model: nn.Module) -> None:
    """Give `model` its own caches back. Does nothing when nothing is installed."""
    installed = model.__dict__.get("make_cache")
    if isinstance(installed, InstalledCaches):
        if installed.tap is not None:
            installed.tap.remove()
        del model.__dict__["make_cache"]
        call_whole(model)
        take_masks_as_given(model)
        if installed.before is not None:
            model.make_cache = installed.before


def _chosen(given: str | Method | Eviction | Callable[..., Eviction], **arguments: Any) -> Method | Eviction:
    """The method that `install` was given. ValueError when it is none, or does not take these arguments."""
    if not isinstance(given, Eviction):
        method = as_method(given)
        settings = {name: value for name, value in arguments.items() if name not in ("calibration", "shares")}
        if settings["budget"] is None or has_own_budgets(settings["budget"]):
            del settings["budget"]
        calibrated = arguments["calibration"] is not None
        check_settings(method, with_default_recent(method, settings, RECENT_SHARE), calibrated=calibrated)
        return method
    told = [name for name, value in arguments.items() if value is not None]
    if told and set(told) <= NO_WIDTHS.keys():
        raise ValueError(
            f"an Eviction stores its rows in its own widths, and {', '.join(told)} (bits is key_bits and value_bits in "
            "one) cannot change them; give velox_fn.quantised(method, key_bits=8, value_bits=8) to install, or install "
            "the factory with bits=8"
        )
    if told:
        raise ValueError(
            f"an Eviction has its budget and settings already, and {', '.join(told)} cannot change it; give them to "
            "the factory that made it, or install the factory"
        )
    return given
