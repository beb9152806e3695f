"""How the tokens of a prefill step are split into requests, and what every such step is held to."""

from hypothesis import strategies as st

from cglab.graphs.out_forms import same_bits

BUCKETS = (4, 8, 16)
ROOM = {"max_requests": 8, "max_cached": 128}
"""A request axis that holds every step of these."""
SPLITS = [
    [(1, 0, 16)],
    [(1, 0, 3), (2, 0, 4), (3, 0, 6)],
    [(4, 11, 5), (2, 0, 1)],
    [(1, 15, 1), (2, 3, 1), (3, 9, 1)],
    [(5, 7, 9), (6, 0, 4), (7, 1, 2), (8, 15, 1)],
]
"""Fresh, cached and mixed requests as (row, start, length)."""


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


def same_cache(one, other):
    """Bitwise, but for slot 0."""
    return all(same_bits(cache[:, 1:], kept[:, 1:]) for cache, kept in zip(one, other, strict=True))


def check(one, spans):
    """One captured step equals padded eager to the bit: hidden states, and the cache but for slot 0."""
    got, wanted, after, expected = one.both(spans)
    assert same_bits(got, wanted) and got.isfinite().all(), spans
    assert same_cache(after, expected), f"cache after {spans}"
    return got


def check_all(one, steps):
    """Steps one after the other, none of them eager."""
    one.runner.coverage().clear()
    for spans in steps:
        if sum(length for *_, length in spans) > 1:  # a single token is below the waste ceiling
            check(one, spans)
    assert one.runner.coverage().reasons == {}
