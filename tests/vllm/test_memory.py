"""What the plugin takes from the cache's share of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from latent_santa.patches.vllm.memory import for_cache
from latent_santa.patches.vllm.settings import read

TWO = {"LATENT_SANTA_ROUTING": "two_stage"}


def spec(size: int, width: int = 576) -> SimpleNamespace:
    """A layer's cache in bfloat16."""
    return SimpleNamespace(block_size=size, head_size=width, dtype=torch.bfloat16, page_size_bytes=2 * size * width)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("environment, each", [({}, 24), (TWO, 24 + 1152)])  # bytes of records per parent of 16 rows
def test_blocks_and_their_records_share_what_scratch_leaves(environment: dict[str, str], each: int, size: int) -> None:
    page, blocks, scratch = 27 * size * 1152, 1000, 12345
    room = blocks * (page + 27 * size // 16 * each) + scratch
    found = for_cache(room, [spec(size)] * 27, read(environment), scratch, 8)
    assert found // page == blocks
    assert for_cache(room - 1, [spec(size)] * 27, read(environment), scratch, 8) // page == blocks - 1


def test_scratch_that_leaves_nothing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="needs 2.00 GiB for a step of 512 requests, and 1.00 are left.*max_num_seqs"):
        for_cache(1 << 30, [spec(16)], read({}), 2 << 30, 512)
