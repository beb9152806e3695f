"""A test and what it shares with others begin from the same seeds, whatever ran before."""

import pytest
import torch


@pytest.fixture(scope="module")
def made():
    return torch.randn(3)


@pytest.mark.parametrize("when", ["first", "again"])
def test_a_shared_fixture_is_made_of_the_same_numbers_and_takes_none_of_the_tests_own(request, when):
    wanted = torch.Generator().manual_seed(0)
    first = torch.randn(3, generator=wanted)
    assert torch.equal(torch.randn(3), first)
    assert torch.equal(request.getfixturevalue("made"), first)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=wanted))
