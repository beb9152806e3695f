"""A toggle is a flag or variable of a version, or there is a reason why not: never a guess."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import ToggleError
from cglab.lab.techniques import TECHNIQUES
from cglab.serving import toggles
from cglab.serving.toggles import KNOWN, Missing, Switch, rows, settings, switch


def test_every_technique_has_a_row_for_every_known_version():
    assert {technique.name: technique.id for technique in TECHNIQUES.values()} == toggles.TECHNIQUES
    assert set(KNOWN) == {"0.5.16", "0.5.23"}
    for known in KNOWN.values():
        assert set(known) == set(TECHNIQUES)


def test_values_are_those_of_the_lab():
    for known in KNOWN.values():
        for name, found in known.items():
            if isinstance(found, Switch):
                assert set(found.values) == set(TECHNIQUES[name].values)


def test_rows_say_flag_or_variable_with_values_or_why_there_is_none():
    table = rows()
    assert list(table) == [technique.id for technique in TECHNIQUES.values()]
    assert table["T1"]["0.5.23"] == {
        "flag": "--cuda-graph-backend-decode",
        "values": {"full": "full", "breakable": "breakable", "eager": "disabled"},
        "note": "one switch for decode, verify and the draft's graphs together",
    }
    assert table["T5"]["0.5.16"]["environment"] == "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER"
    assert set(table["T8"]["0.5.23"]) == {"none"}
    assert "flag" in table["T7"]["0.5.23"] and "none" in table["T7"]["0.5.16"]


def test_what_is_installed_has_the_last_word(installed):
    """The stand-in has two of the three switches, and says 0.5.23."""
    assert isinstance(switch("decode", installed), Switch)
    missing = switch("draft_sampler", installed)
    assert missing == Missing("not available in 0.5.23: no variable SGLANG_DFLASH_EAGER_DRAFT_SAMPLER")
    without = dataclasses.replace(installed, arguments={})
    assert switch("prefill", without) == Missing(
        "not available in 0.5.23: no argument --cuda-graph-backend-prefill"
    )
    assert "none" in rows(without)["T6"]["0.5.23"] and "flag" in rows()["T6"]["0.5.23"]


def test_a_value_that_the_installed_version_lacks_is_no_value(installed):
    argument = dataclasses.replace(
        installed.arguments["--cuda-graph-backend-prefill"], choices=("full", "disabled")
    )
    older = dataclasses.replace(
        installed, arguments={**installed.arguments, "--cuda-graph-backend-prefill": argument}
    )
    with pytest.raises(
        ToggleError, match=r"'breakable' is no setting of SGLang 0\.5\.23; good values: full, eager"
    ):
        settings({"prefill": "breakable"}, older)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.5.16", "0.5.16"),
        ("0.5.20", "0.5.16"),
        ("0.5.23.post1", "0.5.23"),
        ("0.6.0rc1", "0.5.23"),
        ("0.5.2", "0.5.16"),
    ],
)
def test_a_version_between_is_read_by_the_one_before(version, known, installed):
    assert toggles._nearest(version) == known
    other = dataclasses.replace(installed, version=version)
    assert rows(other)["T7"][version] == rows()["T7"][known]


def test_toggles_become_flags_and_variables(installed):
    full = dataclasses.replace(
        installed, variables=installed.variables | {"SGLANG_DFLASH_EAGER_DRAFT_SAMPLER"}
    )
    found = settings({"decode": "eager", "prefill": "breakable", "draft_sampler": "eager"}, full)
    assert found.arguments == (
        "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "breakable",
    )  # fmt: skip
    assert found.environment == {"SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": "1"}


@given(
    st.dictionaries(st.sampled_from(["decode", "verify", "draft_loop"]), st.sampled_from(["full", "eager"]))
)
def test_toggles_that_one_switch_drives_agree_or_are_refused(installed, wanted):
    values = set(wanted.values())
    if len(values) > 1:
        with pytest.raises(ToggleError, match="are one switch in SGLang"):
            settings(wanted, installed)
    else:
        assert settings(wanted, installed).arguments[1:] == tuple(
            {"full": "full", "eager": "disabled"}[v] for v in values
        )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"decoding": "full"}, "good names: decode, verify"),
        ({"decode": "graph"}, "good values: full, breakable, eager"),
        ({"seed_step": "eager"}, r"seed_step \(T4\) has no switch in SGLang 0\.5\.23: .*; leave it out"),
        ({"dsa_attention": "eager"}, "breaks of the prefill graph"),
    ],
)
def test_a_toggle_that_cannot_be_set_says_what_can(installed, wanted, said):
    with pytest.raises(ToggleError, match=said):
        settings(wanted, installed)
