"""``serve-compare``: a recipe's arms on real SGLang servers, in turns, beside what its source published."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from cglab import settings
from cglab.commands.console import FAILS, HOLDS, Outcome, advance, note, progress_bar, text_table
from cglab.commands.files import output_folder
from cglab.measure.published import load_published
from cglab.measure.record import Record
from cglab.measure.records import append, load
from cglab.serving.compare import BENCH, compare_servers
from cglab.serving.comparison import ServerComparison
from cglab.serving.recipe_files import find_recipe
from cglab.serving.recipes import Recipe, Variant
from cglab.serving.recorded import RecordedServers, require_one_comparison

_SHOWN = (
    "point", "measure", "arm", "ms", "change_percent", "verdict", "published_ms", "published_percent",
    "user_tok_s_p50", "user_tok_s_p90", "tok_s_per_gpu", "accept_length", "occupancy_percent", "errors", "in_flight",
)  # fmt: skip


def serve_compare(options: Namespace) -> Outcome:
    """Runs one variant of a recipe; status 1 if a server or a request failed, or two arms gave different tokens."""
    recipe = find_recipe(options.recipe)
    scale = options.variant or ("gpu" if settings.device().type == "cuda" else "cpu")
    variant = recipe.variant(scale)
    if options.model is not None:
        variant = variant.of(options.model)
    published = variant.published_figures(load_published())
    folder = output_folder(options.out)
    kept: list[Record] = []
    place = (settings.read_settings().data / "results" if options.save else folder) / f"{BENCH}.jsonl"

    earlier = load(place).records if options.run_name is not None and place.exists() else ()
    joined = [each for each in earlier if each.run == options.run_name and each.bench == BENCH]

    def keep(record: Record) -> None:
        if record.bench == BENCH:
            require_one_comparison([*joined, record])
        kept.append(record)
        append(place, [record])  # at once: whatever ends it early leaves what it has measured

    with progress_bar(None, recipe.name, "server") as bar:
        found = compare_servers(
            variant.server_arms(folder / "models"), variant.workloads(), folder=folder,
            instances=options.instances, order=options.order, confirm=options.confirm, declared=variant.declared,
            devices=max(variant.gpus, 1), deadline=options.deadline, keep=keep, progress=partial(advance, bar),
            run=options.run_name, facts=_facts(recipe, variant, scale),
        )  # fmt: skip
    note(f"{len(kept)} records added to {place}; logs are in {folder}")
    found = replace(found, published=published)
    equal = all(each.tokens.ok for each in found.parity.values())
    value: dict[str, Any] = {
        "recipe": recipe.name, "variant": scale, "cannot": list(recipe.cannot), "tables": list(recipe.tables),
    }  # fmt: skip
    text = "\n".join([_table(found), "", str(found), *_said(recipe, variant)])
    if options.run_name is not None:
        whole = RecordedServers(
            (
                tuple(
                    each
                    for each in load(place).records
                    if each.run == options.run_name and each.bench == BENCH
                ),
            )
        )
        value["run"] = whole.rows()
        text += f"\nAll instances of run {options.run_name}:\n{whole.as_frame().to_string(index=False)}"
    return Outcome(
        text,
        {**value, **found.as_dict()},
        HOLDS if equal and not found.failed and not found.incomplete else FAILS,
    )


def _facts(recipe: Recipe, variant: Variant, scale: str) -> dict[str, str]:
    notes = f"recipe {recipe.name}, {scale}. {variant.note}".strip()
    weights = "random" if variant.random or "dummy" in variant.arguments else "trained"
    # Folders of this machine are nobody else's business.
    model = Path(variant.model).name if Path(variant.model).is_absolute() else variant.model
    return {"model": model, "weights": weights, "dtype": variant.dtype, "notes": notes}


def _table(found: ServerComparison) -> str:
    """The columns that say anything: not every arm has drafts, or a published figure."""
    rows = found.rows()
    shown = [column for column in _SHOWN if any(row[column] is not None for row in rows)]
    return text_table(shown, [[_short(row[column]) for column in shown] for row in rows])


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _said(recipe: Recipe, variant: Variant) -> list[str]:
    lines = [f"Published: {', '.join(recipe.tables)} (`cglab published` prints them)."]
    lines += [f"{recipe.source}: {each}" for each in recipe.cannot]
    lines += [variant.note] if variant.note else []
    return [part for line in lines for part in wrap(line, 110)]
