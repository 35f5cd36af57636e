"""A checkpoint that lacks something is refused by its name, in our words, and never completed with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import models
from latent_santa.patches.limits import context_limit

from .eval_support import save_random_model
from .tiny_models import tiny_model

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


def load(directory: Path) -> models.Loaded:
    spec = models.ModelSpec(str(directory), device="cpu")
    spec.check()
    return models.load(spec, None)


def change(directory: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_projection_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(save_random_model(tmp_path) / "model.safetensors")
    assert load(tmp_path).facts["parameters"] == sum(weight.numel() for weight in weights.values())
    change(tmp_path, {name: weight for name, weight in weights.items() if name != KV_B})
    for command in (["check"], ["compare", "--length", "300"]):
        assert main([*command, "--model", str(tmp_path)]) == 2
        assert f"lacks 1 weight ({KV_B}); random ones would stand in" in capsys.readouterr().err


def test_every_missing_weight_is_counted_and_three_are_named(tmp_path: Path) -> None:
    weights = load_file(save_random_model(tmp_path) / "model.safetensors")
    change(tmp_path, {name: weight for name, weight in weights.items() if "layers.1" not in name})
    lost = sum("layers.1" in name for name in weights)
    with pytest.raises(EvalError, match=rf"lacks {lost} weights \(model.layers.1.input_layernorm.weight, .*, \.\.\.\)"):
        load(tmp_path)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    weights = load_file(save_random_model(tmp_path) / "model.safetensors")
    change(tmp_path, weights | {KV_B: torch.zeros(3, 4)})
    with pytest.raises(EvalError, match=rf"1 weight \({KV_B}\) of other shapes .* \(3, 4\), not \(32, 16\)"):
        load(tmp_path)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    """Experts are stacked while they are loaded, so that one that is missing is none of the missing names."""
    tiny_model("deepseek_v2-experts").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(tmp_path, {name: weight for name, weight in weights.items() if "experts.1.down_proj" not in name})
    with pytest.raises(EvalError, match="model.layers.1.mlp.experts.down_proj"):
        load(tmp_path)


def test_tied_weights_are_not_missing_but_their_source_is(tmp_path: Path) -> None:
    tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    load(tmp_path)
    change(tmp_path, {name: weight for name, weight in weights.items() if "embed_tokens" not in name})
    with pytest.raises(EvalError, match="lacks 2 weights .*model.embed_tokens.weight"):
        load(tmp_path)


def test_weights_without_a_place_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(save_random_model(tmp_path) / "model.safetensors")
    change(tmp_path, weights | {"model.extra": torch.zeros(2)})
    load(tmp_path)
    assert f"note: {tmp_path} has 1 weight (model.extra) without a place in the model" in capsys.readouterr().err


def test_what_a_directory_lacks_is_said_before_transformers_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(model: Any) -> str:
        assert main(["check", "--model", str(model)]) == 2
        return capsys.readouterr().err

    for name in ("", "  "):
        with pytest.raises(EvalError, match=f"--model '{name}': no such directory; give a hub id"):
            models.ModelSpec(name).check()
    assert "the directory has no config.json, so it holds no model" in refusal(tmp_path)
    assert main(["ruler", "--model", str(tmp_path), "--dry-run"]) == 2  # it checks no weights, and none are needed
    assert "the directory has no config.json" in capsys.readouterr().err
    model = save_random_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(tmp_path / "away")
    assert "has a config.json, but no weights (*.safetensors or *.bin)" in refusal(model)
    change(model, weights)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert "lists 2 files, and model-2.safetensors is not there" in refusal(model)
    index.write_text("[]")
    assert "model.safetensors.index.json is no index of weights" in refusal(model)
    (model / "model-1.safetensors").rename(model / "model.safetensors")
    models.ModelSpec(str(model)).check()  # nobody reads the index beside the whole file
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index.unlink()
    (model / "model-1.safetensors").rename(model / "model.safetensors")
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer (tokenizer.json or the like)" in refusal(model)


class Config:
    """A text configuration with what the limit is read from."""

    def __init__(self, limit: int | None, **rope: Any) -> None:
        self.max_position_embeddings, self.rope_parameters = limit, rope


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LIMITS: dict[str, tuple[Config, int | None]] = {
    "plain": (Config(4096, rope_type="default"), 4096),
    "none stated": (Config(None, **YARN), None),
    "yarn, trained length stated (Qwen2.5)": (Config(32768, **YARN), 131072),
    "yarn, product stated (DeepSeek-V2)": (Config(131072, **YARN), 131072),
    "yarn by its old name": (Config(32768, type="yarn", factor=2.0, original_max_position_embeddings=32768), 65536),
    "llama3 states its reach": (
        Config(131072, rope_type="llama3", factor=32.0, original_max_position_embeddings=8192),
        131072,
    ),
    "longrope states its reach": (
        Config(4096, rope_type="longrope", factor=2.0, original_max_position_embeddings=4096),
        4096,
    ),
    "one of several layer types": (
        Config(32768, full_attention=YARN, sliding_attention={"rope_type": "default"}),
        131072,
    ),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_context_limit_counts_stretched_positions(kind: str) -> None:
    config, limit = LIMITS[kind]
    assert context_limit(config) == limit


def test_the_context_limit_of_a_real_configuration() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 256}
    assert context_limit(tiny_model("llama", rope_parameters=yarn).config) == 2048
    assert context_limit(tiny_model("qwen2").config) == 256
