"""Text to token ids and back, by the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cglab.errors import ModelError


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        vocab_size: token ids are below this.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.vocab_size = max(inner.get_vocab().values()) + 1

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """Reads ``tokenizer.json``.

        Args:
            folder: a model's folder.

        Returns:
            The tokenizer, or None if the folder has none.

        Raises:
            ModelError: if the file is damaged.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is no readable tokenizer ({error}); fetch the file again") from error

    @classmethod
    def byte_level(cls, vocab_size: int) -> Tokenizer:
        """A stand-in for models with random weights, which have no tokenizer of their own.

        Every byte of a text is one of the tokens 0 to 255; ids above, which such a model predicts all the
        time, decode to ``<id>``.

        Args:
            vocab_size: the model's vocabulary; at least 256.

        Raises:
            ModelError: if the vocabulary is too small for the bytes.
        """
        if vocab_size < 256:
            raise ModelError(
                f"a vocabulary of {vocab_size} cannot hold 256 bytes; use a model with a larger one"
            )
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = [*alphabet, *(f"<{token}>" for token in range(len(alphabet), vocab_size))]
        inner = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        return cls(inner)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the model's own template adds (such as a first token)."""
        return self._inner.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out."""
        return self._inner.decode(list(ids))
