"""Arms are told apart by colour with any colour vision: distances of the colours as each kind of eye sees them."""

import itertools

import numpy as np
import pytest

from cglab.lab.techniques import TECHNIQUES
from cglab.ui.style import COLOURS, colour

EYES = {  # of Machado, Oliveira and Fernandes (2009), severity 1
    "all cones": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ @ np.ones(3)
APART = 15.0
"""CIELAB distance that is seen at once; about 2 is the least that is seen at all."""


def lab_colour(code, eye):
    channels = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.clip(TO_XYZ @ np.clip(EYES[eye] @ linear, 0, 1), 1e-6, None) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
def test_the_values_of_every_toggle_are_told_apart(eye):
    for each in TECHNIQUES.values():
        for one, other in itertools.combinations(each.values, 2):
            distance = np.linalg.norm(lab_colour(colour(one), eye) - lab_colour(colour(other), eye))
            assert distance > APART, (each.name, one, other, distance)


def test_every_value_of_a_toggle_has_a_colour_of_its_own_in_the_table():
    values = {value for each in TECHNIQUES.values() for value in each.values}
    assert values <= set(COLOURS)
    captured = [COLOURS[value] for value in values - {"eager", "off"}]
    assert len(set(captured)) == len(captured)
    assert COLOURS["eager"] == COLOURS["off"] not in captured
