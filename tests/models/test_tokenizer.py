import pytest

from cglab.errors import ModelError
from cglab.models.tokenizer import Tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "", "naïve — 漢字 🙂", "\t\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_shipped_and_the_stand_in_tokenizer(root, text):
    for tokenizer in (Tokenizer.from_folder(root / "data/models/pico-gqa"), Tokenizer.byte_level(1000)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and all(token < tokenizer.vocab_size for token in ids)


def test_the_stand_in_has_a_token_for_each_byte_and_shows_the_rest_as_numbers():
    tokenizer = Tokenizer.byte_level(151936)
    ids = tokenizer.encode("é!")
    assert len(ids) == 3 and max(ids) < 256 and tokenizer.vocab_size == 151936
    assert tokenizer.decode([*ids, 256, 151935]) == "é!<256><151935>"
    with pytest.raises(ModelError, match="a vocabulary of 100 cannot hold 256 bytes"):
        Tokenizer.byte_level(100)


def test_the_end_token_is_no_text(root):
    assert Tokenizer.from_folder(root / "data/models/pico-gqa").decode([0]) == ""


def test_a_folder_may_have_none_but_not_a_damaged_one(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is no readable tokenizer .*fetch the file again"):
        Tokenizer.from_folder(tmp_path)
