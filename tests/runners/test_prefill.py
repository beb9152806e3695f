"""T6, the prefill body: captured against padded eager, over every split of the tokens into requests."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cglab.graphs.out_forms import same_bits

backends = pytest.mark.parametrize("backend", ["breakable"])
BUCKETS = (4, 8, 16)


def check(one, spans):
    """One captured step equals padded eager to the bit: hidden states, and the cache but for slot 0."""
    got, wanted, after, expected = one.both(spans)
    assert same_bits(got, wanted), spans
    assert same_bits(after[:, :, 1:], expected[:, :, 1:]), f"cache after {spans}"
    return got


@st.composite
def splits(draw):
    """Up to 16 tokens of up to 8 requests, cached tokens before some of them."""
    spans, left = [], 16
    for row in range(1, 1 + draw(st.integers(1, 8))):
        if left:
            length = draw(st.integers(1, left))
            spans.append((row, draw(st.integers(0, 16 - length)), length))
            left -= length
    return spans


@backends
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(splits(), min_size=1, max_size=5))
def test_p37_p38_one_recording_serves_every_split_and_live_count_bitwise(prefills, backend, steps):
    one = prefills.made[0] if prefills.made else prefills(backend, BUCKETS)
    one.runner.coverage().clear()
    for spans in steps:
        if sum(length for *_, length in spans) > 1:  # a single token is below the waste ceiling
            check(one, spans)
    assert one.runner.coverage().reasons == {}
