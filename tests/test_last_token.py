"""What the replay of the last token is given: everything with an entry per token is cut."""

from __future__ import annotations

import pytest
import torch
import transformers

import latent_santa
from latent_santa.patches.last_token import last_token

from .tiny_models import assert_same, generate, prompt, scaled_up

EVERY_TEAM = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 4096}


def test_per_token_arguments_are_cut():
    batch, new = 2, 6
    visual = torch.zeros(batch, new, dtype=torch.bool)
    visual[0, 1:3] = visual[1, 4:] = True
    features = torch.arange(4.0)[:, None]
    given = {
        "input_ids": torch.arange(12).view(batch, new),
        "attention_mask": torch.ones(batch, 9),
        "position_ids": torch.arange(new).expand(3, batch, new),
        "cache_position": torch.arange(3, 9),
        "mm_token_type_ids": torch.ones(batch, new),
        "some_states": torch.randn(batch, new, 4),
        "visual_pos_masks": visual,
        "deepstack_visual_embeds": [features, features + 10],
        "use_cache": True,
        "pixel_values": None,
    }
    cut = last_token(given)
    assert cut["input_ids"].tolist() == [[5], [11]]
    assert cut["attention_mask"].shape == (2, 9) and cut["position_ids"].shape == (3, 2, 1)
    assert cut["cache_position"].tolist() == [8] and cut["mm_token_type_ids"].shape == (2, 1)
    assert cut["some_states"].equal(given["some_states"][:, -1:])
    assert cut["visual_pos_masks"].tolist() == [[False], [True]]
    # of the four visual tokens only the second sequence's last one is the last token
    assert [part.tolist() for part in cut["deepstack_visual_embeds"]] == [[[3.0]], [[13.0]]]
    assert cut["use_cache"] is True and cut["pixel_values"] is None
    embedded = last_token({"input_ids": None, "inputs_embeds": torch.randn(1, 5, 3)})
    assert embedded["inputs_embeds"].shape == (1, 1, 3)


def qwen3_vl():
    text = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=32,
        num_position_embeddings=64, deepstack_visual_indexes=[0],
    )  # fmt: skip
    tokens = {"image_token_id": 90, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return scaled_up(transformers.Qwen3VLForConditionalGeneration(config))


@pytest.mark.parametrize("behind", [20, 0])
def test_an_image_in_the_prompt(behind):
    """Features of visual tokens go to each layer beside the ids; the last token may be visual itself."""
    model = qwen3_vl()
    text, image = prompt(25).clamp(max=80), torch.tensor([[92] + [90] * 4])
    ids = torch.cat((text[:, :5], image, torch.full((1, bool(behind)), 93), text[:, 5 : 5 + behind]), 1)
    options = {
        "pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 90).int(),
    }  # fmt: skip
    wanted = generate(model, ids, 4, **options)
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert_same(generate(model, ids, 4, **options), wanted)
        assert santa.sparse_calls == 4
        blank = {**options, "pixel_values": torch.zeros(16, 96)}
        assert not generate(model, ids, 4, **blank).scores[0].allclose(wanted.scores[0], atol=1e-3)
