"""The errors are the tree that their module draws, and a wrong name gets the nearest good one."""

import inspect
import re

from cglab import errors, settings


def drawn(text):
    """Each error of the drawn tree with the one above it."""
    above, found = ["CglabError"], {}
    for indent, name in re.findall(r"^    ([ |]*)\+-- (\w+)", text, re.MULTILINE):
        depth = 1 + len(indent) // 4
        found[name] = above[depth - 1]
        above[depth:] = [name]
    return found


def test_the_tree_of_errors_is_drawn_whole():
    real = {
        each.__name__: each.__bases__[0].__name__
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.CglabError) and each is not errors.CglabError
    }
    assert drawn(errors.__doc__) == real


def test_the_table_of_settings_has_every_variable():
    assert set(re.findall(r"^\| ``(CGLAB_\w+)``", settings.__doc__, re.MULTILINE)) == set(settings.VARIABLES)


def test_a_wrong_name_is_told_with_the_nearest_and_all_good_ones():
    assert errors.no_such("arm", "ful", ["full", "eager"]) == (
        "'ful' is no arm (did you mean full?); good names: full, eager"
    )
    assert errors.no_such("claim", "g1", ["G1", "E1"]).startswith("'g1' is no claim (did you mean G1")
    assert errors.no_such("arm", 7, []) == "7 is no arm; good names: none"
