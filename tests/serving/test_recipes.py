"""Recipes are data: every one is whole, names real flags and rows, and says what cannot be toggled."""

import json
import re

import pytest

from cglab.errors import InputError
from cglab.measure.published import SOURCES, load_published
from cglab.serving.fairness import flags, require_equal_arms
from cglab.serving.recipe_files import find_recipe, load_recipes
from cglab.serving.recipes import VARIANTS
from cglab.serving.toggles import KNOWN

RECIPES = load_recipes()
CASES = [(recipe.name, name) for recipe in RECIPES.values() for name in recipe.variants]


def test_one_recipe_a_source_each_with_a_small_scale():
    assert [recipe.source for recipe in RECIPES.values()] == list(SOURCES)
    assert all({"gpu", "cpu"} <= set(recipe.variants) <= set(VARIANTS) for recipe in RECIPES.values())
    # What a source does not state is not made up.
    assert {recipe.source for recipe in RECIPES.values() if "published" in recipe.variants} == {
        "S0",
        "S2",
        "S3",
    }


@pytest.mark.parametrize("name", RECIPES)
def test_what_cannot_be_toggled_is_said_and_tables_are_there(name):
    recipe = RECIPES[name]
    assert recipe.cannot and set(recipe.tables) <= set(load_published())
    assert all(re.fullmatch(r"T([1-9]|10)", each) for each in recipe.techniques)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_arms_are_equal_but_for_what_is_compared(name, scale, tmp_path):
    variant = RECIPES[name].variant(scale)
    arms = variant.server_arms(tmp_path)
    require_equal_arms(arms, variant.declared)
    assert len({workload.name for workload in variant.workloads()}) == len(variant.points)
    for arm in arms:
        assert len(flags(arm.arguments)) == sum(word.startswith("--") for word in arm.arguments)
        assert (arm.device == "cpu") == (scale == "cpu")
        assert all(toggle in KNOWN["0.5.23"] for toggle in arm.toggles)
    if scale == "cpu":
        longest = max(workload.load.longest for workload in variant.workloads())
        assert longest * 8 <= 8192  # tokens that a server on a CPU has room for
    elif scale == "gpu":
        # What a server would size by the memory that is free differs between arms, so it is given.
        assert {"--max-total-tokens", "--mem-fraction-static"} <= set(flags(arms[0].arguments))
        assert any(arm.toggles != arms[0].toggles for arm in arms)


def test_published_rows_are_found_and_keep_their_figures():
    figures = RECIPES["s3-dsa-prefill"].variant("published").published_figures(load_published())
    assert len(figures) == 22
    assert figures["512 new, 64 out, 1 lanes"]["ttft_ms"] == {"base": 71, "other": 49, "change": -30}
    assert figures["131072 cached + 4096 new, 64 out, 16 lanes"]["ttft_ms"]["change"] == -20
    assert figures["1000 new, 512 out, 4 lanes"]["tpot_ms"]["base"] == 4.61
    chat = RECIPES["s0-seed-step"].variant("published").published_figures(load_published())
    assert chat["1000 new, 1000 out, 80 lanes"]["tpot_ms"] == {"base": 34.0, "other": 32.1, "change": -5.7}


def test_random_weights_and_drafts_become_folders(tmp_path):
    arm, _ = RECIPES["s4-draft-sampler"].variant("gpu").server_arms(tmp_path)
    words = flags(arm.arguments)
    assert words["--load-format"] == words["--speculative-draft-load-format"] == ("dummy",)
    draft = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert draft["architectures"] == ["DFlashDraftModel"] and draft["num_hidden_layers"] == 5
    assert draft["dflash_config"]["mask_token_id"] < draft["vocab_size"]
    assert words["--speculative-draft-model-path"] == (str(tmp_path / "draft"),)


def test_a_recipe_is_found_by_name_and_source_and_an_unknown_one_lists_them():
    assert find_recipe("S3") is not None and find_recipe("s3-dsa-prefill").source == "S3"
    with pytest.raises(InputError, match="'s9' is no recipe.*; good names: s0-seed-step"):
        find_recipe("s9")
    with pytest.raises(
        InputError, match="'published' is no variant of recipe s1-decode-runner; good names: gpu, cpu"
    ):
        find_recipe("s1").variant("published")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("source = ", "Invalid value"),
        (
            'source = "S0"\n[cpu]\nhardwear = "x"\narms = []\npoints = []',
            "'hardwear' is no field of a variant",
        ),
        ('source = "S0"', "a recipe needs techniques, title, "),
        ("[cpu]\narms = []", "points"),
    ],
)
def test_a_broken_recipe_names_its_file_and_fault(tmp_path, text, told):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InputError, match=rf"mine\.toml is no recipe: (.|\n)*{told}"):
        load_recipes(tmp_path)


def test_a_broken_recipe_is_in_the_way_of_no_other(root, tmp_path):
    for file in (root / "data" / "recipes").glob("*.toml"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a-broken-one.toml").write_text("source =")
    assert find_recipe("s3", tmp_path).source == "S3"
    with pytest.raises(InputError, match=r"a-broken-one\.toml is no recipe"):
        find_recipe("s9", tmp_path)


def test_without_recipes_it_says_where_they_come_from(tmp_path):
    with pytest.raises(InputError, match="come with a clone"):
        load_recipes(tmp_path)
