"""Prepares the corpus of the pico models: the standard library's source, and a tokenizer trained on it.

    PYTHONPATH=. python scripts/pico_corpus.py [--out .work/pico]

Writes ``tokenizer.json``, ``train.npy`` and ``held_out.npy`` (uint16 token ids, documents separated by
``<|endoftext|>``), ``prompts.json`` (held-out prompts) and ``manifest.json`` (interpreter version, hash and
counts of the corpus, held-out files). Nothing is downloaded. The same interpreter gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
HELD_OUT_SHARE = 50  # one file in fifty
PROMPT_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256)
PROMPT_COUNT = 72
PROMPTS_PER_FILE = 3
NOT_LIBRARY = ("site-packages/", "dist-packages/", "config-", "_sysconfigdata")

Corpus = dict[str, str]


def read_corpus(root: Path) -> tuple[Corpus, int]:
    """Reads the library's source files.

    Args:
        root: the standard library's folder.

    Returns:
        Text by relative name, in sorted order, and how many files were left out because they are not UTF-8.
        Installed packages and the files that describe this one build of the interpreter (they hold local
        paths) are no part of the library.
    """
    corpus: Corpus = {}
    skipped = 0
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if name.startswith(NOT_LIBRARY):
            continue
        try:
            corpus[name] = (root / name).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped += 1
    return corpus, skipped


def is_held_out(name: str) -> bool:
    """Whether a whole file is kept from training: decided by its name alone, so it holds across versions."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def corpus_hash(corpus: Corpus) -> str:
    """SHA-256 over names and contents in order."""
    digest = hashlib.sha256()
    for name, text in corpus.items():
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer whose token 0 is the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def encode(tokenizer: Tokenizer, corpus: Corpus) -> np.ndarray:
    """Token ids [n] uint16 of all documents, each followed by the end of text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    batches = tokenizer.encode_batch(list(corpus.values()), add_special_tokens=False)
    return np.concatenate([np.array([*batch.ids, end], dtype=np.uint16) for batch in batches])


def choose_prompts(tokenizer: Tokenizer, held_out: Corpus) -> list[dict[str, object]]:
    """Prompts of mixed length from held-out files, at most a few from one file, none with an address in it.

    A prompt starts at a line and decodes to text that encodes to the same tokens, so that text and ids say
    the same.
    """
    prompts: list[dict[str, object]] = []
    lengths = itertools.cycle(PROMPT_LENGTHS)
    length = next(lengths)
    for part in range(PROMPTS_PER_FILE):
        for name, text in held_out.items():
            lines = text.splitlines(keepends=True)
            start = sum(map(len, lines[: len(lines) * part // PROMPTS_PER_FILE]))
            ids = tokenizer.encode(text[start : start + 12 * length], add_special_tokens=False).ids[:length]
            prompt = tokenizer.decode(ids)
            again = tokenizer.encode(prompt, add_special_tokens=False).ids
            if len(ids) < length or again != ids or "://" in prompt or not prompt.isascii():
                continue
            prompts.append({"file": name, "text": prompt, "ids": ids})
            length = next(lengths)
            if len(prompts) == PROMPT_COUNT:
                return prompts
    raise SystemExit(f"only {len(prompts)} of {PROMPT_COUNT} prompts found in {len(held_out)} held-out files")


def prepare(root: Path, out: Path) -> dict[str, object]:
    """Writes everything that training needs.

    Args:
        root: the standard library's folder.
        out: folder to write to; made if missing.

    Returns:
        The manifest.
    """
    corpus, skipped = read_corpus(root)
    train = {name: text for name, text in corpus.items() if not is_held_out(name)}
    held_out = {name: text for name, text in corpus.items() if is_held_out(name)}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(list(train.values()))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    train_ids, held_out_ids = encode(tokenizer, train), encode(tokenizer, held_out)
    np.save(out / "train.npy", train_ids)
    np.save(out / "held_out.npy", held_out_ids)
    prompts = choose_prompts(tokenizer, held_out)
    rows = ",\n".join(json.dumps(prompt) for prompt in prompts)
    (out / "prompts.json").write_text(f"[\n{rows}\n]\n")
    manifest: dict[str, object] = {
        "python": platform.python_version(),
        "corpus_sha256": corpus_hash(corpus),
        "files": len(corpus),
        "files_not_utf8": skipped,
        "train_files": len(train),
        "train_bytes": sum(len(text.encode()) for text in train.values()),
        "train_tokens": len(train_ids),
        "held_out_bytes": sum(len(text.encode()) for text in held_out.values()),
        "held_out_tokens": len(held_out_ids),
        "held_out_files": list(held_out),
        "vocabulary": tokenizer.get_vocab_size(),
        "prompts": len(prompts),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def main() -> None:
    """Reads the command line and prepares the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".work/pico"))
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")))
    options = parser.parse_args()
    manifest = prepare(options.library, options.out)
    print(json.dumps({key: value for key, value in manifest.items() if key != "held_out_files"}, indent=1))


if __name__ == "__main__":
    main()
