"""A compressed file of weights is the same file, to the bit; a damaged or oversized one is refused by name."""

import errno
import lzma

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from cglab.errors import ModelError
from cglab.models import shard_file
from cglab.models.checkpoint import check_draft_shards, shard_files
from cglab.models.drafts import find_draft
from cglab.models.shard_file import compress, opened


@pytest.fixture
def folder(tmp_path):
    """A folder with 64 KiB of weights."""
    save_file({"weight": torch.randn(128, 256).to(torch.bfloat16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_compressed_file_is_the_same_bytes_and_is_found_in_its_place(folder):
    plain = (folder / "model.safetensors").read_bytes()
    with opened(folder / "model.safetensors") as tensors:
        weight = tensors.get_tensor("weight")
    compressed = compress(folder / "model.safetensors")
    assert shard_files(folder) == [compressed] and [*folder.iterdir()] == [compressed]
    assert lzma.decompress(compressed.read_bytes()) == plain and compressed.stat().st_size < 0.8 * len(plain)
    with opened(compressed) as tensors:
        assert torch.equal(tensors.get_tensor("weight").view(torch.int16), weight.view(torch.int16))
    (folder / "model.safetensors").write_bytes(plain)
    assert compress(folder / "model.safetensors").read_bytes() == compressed.read_bytes()


@given(share=st.floats(0, 0.99), flip=st.booleans())
def test_a_damaged_file_is_told_by_name_and_leaves_nothing(tmp_path_factory, share, flip):
    folder = tmp_path_factory.mktemp("damaged")
    save_file({"weight": torch.arange(4096.0)}, folder / "model.safetensors")
    path = compress(folder / "model.safetensors")
    content = path.read_bytes()
    at = int(share * len(content))
    path.write_bytes(content[:at] + (bytes([content[at] ^ 1]) + content[at + 1 :] if flip else b""))
    with pytest.raises(ModelError, match=r"model.safetensors.xz is truncated or no safetensors file"):
        check_draft_shards([path], {}, "Assistant")
    assert [*folder.iterdir()] == [path]


def test_a_file_that_would_fill_the_disk_is_refused(folder, monkeypatch):
    monkeypatch.setattr(shard_file, "MOST_BYTES", 1 << 10)
    path = compress(folder / "model.safetensors")
    with pytest.raises(ModelError, match="holds more than 0 MiB, too much for a compressed file"):
        check_draft_shards([path], {}, "Assistant")


@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_disk_without_room_is_no_damage_of_the_file(folder, monkeypatch, where):
    path = compress(folder / "model.safetensors")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "folder":
        monkeypatch.setattr(shard_file, "TemporaryDirectory", refuse)
    else:
        monkeypatch.setattr(shard_file.Path, "open", refuse)
    with pytest.raises(ModelError, match=r"cannot be expanded .*No space left on device.*set TMPDIR"):
        check_draft_shards([path], {}, "Assistant")


def test_a_plain_file_beside_it_is_read_first(folder):
    plain = (folder / "model.safetensors").read_bytes()
    compress(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(plain)
    assert shard_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("name", ["pico-gqa-assistant", "pico-gqa-dflash", "pico-dsa-nextn"])
def test_the_shipped_drafts_are_compressed(name):
    (shard,) = shard_files(find_draft(name).folder)
    assert shard.name == "model.safetensors.xz"
