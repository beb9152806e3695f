"""Every recipe against the installed version: what is small runs there, what no version has is refused by name."""

from dataclasses import replace

import pytest

from cglab.errors import InputError, ToggleError
from cglab.serving.arm import command
from cglab.serving.installed import ask, find_python
from cglab.serving.recipe_files import load_recipes
from cglab.serving.toggles import Missing, switch

pytestmark = pytest.mark.sglang

RECIPES = load_recipes()


@pytest.fixture(scope="module")
def version():
    return ask(find_python())


def resolve(recipe, scale, version, folder):
    """The commands of its arms, for a model that is here."""
    arms = RECIPES[recipe].variant(scale).server_arms(folder)
    return [command(replace(arm, model="pico-gqa"), version, 1) for arm in arms]


@pytest.mark.parametrize("scale", ["gpu", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_small_scales_are_made_of_what_the_version_has(recipe, scale, version, tmp_path):
    first, *others = resolve(recipe, scale, version, tmp_path)
    if scale == "gpu":
        told = (first.argv, dict(first.environment))
        assert all((other.argv, dict(other.environment)) != told for other in others)


@pytest.mark.parametrize(
    ("recipe", "name"), [("s0-seed-step", "DISABLE_SEED_CG"), ("s3-dsa-prefill", "ENABLE_DSA_PREFILL_ATTN")]
)
def test_a_switch_of_a_builds_own_is_refused_by_name(recipe, name, version, tmp_path):
    with pytest.raises(InputError, match=rf"SGLang {version.version} has no variable SGLANG_\w*{name}"):
        resolve(recipe, "published", version, tmp_path)


def test_stages_replay_where_the_version_has_their_switch(version, tmp_path):
    if isinstance(switch("pp_prefill", version), Missing):
        with pytest.raises(ToggleError, match="pp_prefill"):
            resolve("s2-pipeline-prefill", "published", version, tmp_path)
    else:
        assert len(resolve("s2-pipeline-prefill", "published", version, tmp_path)) == 2
