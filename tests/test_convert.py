"""A Qwen2 checkpoint re-expressed as DeepSeek-V2 computes what it did, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import latent_santa
from latent_santa.eval.cli import main
from latent_santa.eval.convert import checkpoint
from latent_santa.eval.errors import EvalError
from latent_santa.eval.tiny.load import MODEL_DIRECTORY

from .tiny_models import assert_same, generate, prompt, tiny_model

# float32 sums in another order; the logits' standard deviation is 1.6, of the tied model 6
TOLERANCE = 5e-5
SHAPES: dict[str, dict[str, Any]] = {
    "two KV heads": {},
    "seven heads of one KV head": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    "one head per KV head, tied embeddings": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "wide heads, three KV heads": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "num_hidden_layers": 3,
    },
}


def convert(source: Path, out: Path, **options: int) -> checkpoint.Converted:
    return checkpoint.convert(source, out, lambda name, steps: None, lambda: None, **options)


def load(path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def saved(path: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any) -> Path:
    tiny_model("qwen2", **changes).to(dtype).save_pretrained(path, max_shard_size=shard)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_target_computes_what_the_source_does(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    source = saved(tmp_path / "gqa", dtype, **SHAPES[shape])
    found = convert(source, tmp_path / "mla")
    gqa, mla = load(source), load(tmp_path / "mla")
    assert type(mla).__name__ == "DeepseekV2ForCausalLM" and not found.left_out
    assert {w.dtype for w in load_file(tmp_path / "mla" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "mla" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    ids = prompt(240, batch=2)
    with torch.no_grad():
        wanted, got = gqa(ids).logits, mla(ids).logits
    # lanes of float16 are small enough for the content to show in the divisor
    tolerance = TOLERANCE if dtype != torch.float16 else 10 * TOLERANCE
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
    assert_same(generate(mla, ids, 8), generate(gqa, ids, 8), 1e-3)


@pytest.mark.parametrize("pairs", [0, 1, 4])
def test_any_number_of_pairs_scores_through_the_latent(tmp_path: Path, pairs: int) -> None:
    """Heads of 16 dimensions: eight pairs, of which the slowest are chosen."""
    source = saved(tmp_path / "gqa", head_dim=16)
    found = convert(source, tmp_path / "mla", content_pairs=pairs).shapes
    assert (found.nope, found.rope) == (2 * pairs, 2 * 16 + 2 * 2 * pairs)
    gqa, mla, ids = load(source), load(tmp_path / "mla"), prompt(240, batch=2)
    with torch.no_grad():
        torch.testing.assert_close(mla(ids).logits, gqa(ids).logits, atol=TOLERANCE, rtol=0)
    wanted = generate(gqa, ids, 8)
    with latent_santa.patch(mla, budget=1600, parents="contiguous"):
        assert_same(generate(mla, ids, 8), wanted, 1e-3)


def test_frequencies_are_the_sources_and_some_pairs_do_not_turn(tmp_path: Path) -> None:
    source = saved(tmp_path / "gqa")
    convert(source, tmp_path / "mla")
    gqa, mla = (load(path).model.rotary_emb.inv_freq for path in (source, tmp_path / "mla"))
    turning = mla[: 2 * len(gqa)]
    assert torch.equal(turning, gqa.repeat(2))
    assert mla[len(turning) :].max() < 1e-20


def test_both_parts_of_a_key_score(tmp_path: Path) -> None:
    """A test of MLA paths on this checkpoint could not see a wrong content score if all were zero."""
    convert(saved(tmp_path / "gqa"), tmp_path / "mla")
    mla = load(tmp_path / "mla")
    ids = prompt(60)
    with torch.no_grad():
        wanted = mla(ids).logits
        for layer in mla.model.layers:
            attention = layer.self_attn
            up = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)
            up[:, : attention.qk_nope_head_dim] = 0
        assert (mla(ids).logits - wanted).abs().max() > 0.1


def test_the_target_is_patched_and_sampled(tmp_path: Path) -> None:
    source = saved(tmp_path / "gqa")
    convert(source, tmp_path / "mla")
    mla, ids = load(tmp_path / "mla"), prompt(120)
    wanted = generate(load(source), ids, 8)
    with latent_santa.patch(mla, budget=1600, parents="contiguous") as santa:
        assert santa.layout == "mla" and santa.layers == 2
        assert_same(generate(mla, ids, 8), wanted, 1e-3)
        santa.configure(budget=16)
        generate(mla, ids, 8)
        assert santa.sparse_calls > santa.full_calls


def test_several_files_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "gqa", shard="20KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 40_000)
    convert(source, tmp_path / "mla")
    assert len(list((tmp_path / "mla").glob("model-*-of-*.safetensors"))) > 2
    assert_same(generate(load(tmp_path / "mla"), prompt(50)), generate(load(source), prompt(50)), 1e-3)


def test_the_command_takes_tokenizer_and_generation_settings_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "gqa", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIRECTORY / name, source / name)
    settings = json.loads((source / "generation_config.json").read_text()) | {"eos_token_id": [2, 7]}
    (source / "generation_config.json").write_text(json.dumps(settings))
    assert main(["convert-to-mla", str(source), str(tmp_path / "mla")]) == 0
    said = capsys.readouterr()
    assert "nothing is compressed" in said.out and "weights: " in said.err
    # latent of 2 x 16 keys and values with lanes, rotary part of 16 keys and 16 that do not turn
    assert "A row holds 48 + 32 numbers" in said.out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "mla").generation_config.eos_token_id == [2, 7]
    texts = ["Where is the key?", "  numbers: 1234"]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "mla", source))
    assert ours(texts).input_ids == theirs(texts).input_ids
    assert ours.chat_template == theirs.chat_template


def test_a_rotary_part_that_the_kernels_do_not_take_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "gqa", head_dim=128)
    told = "The Triton kernels take rotary parts of at most 256 numbers: sampled attention of this one runs in PyTorch"
    assert main(["convert-to-mla", str(source), str(tmp_path / "wide")]) == 0
    assert f"{told}, and --content-pairs 0 would fit." in capsys.readouterr().out
    assert main(["convert-to-mla", str(source), str(tmp_path / "fits"), "--content-pairs", "0"]) == 0
    assert told not in capsys.readouterr().out


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding window"),
    "rope": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "of type 'linear'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_deepseek_v2_does_not_have_is_refused(tmp_path: Path, kind: str) -> None:
    changes, message = REFUSED[kind]
    with pytest.raises(EvalError, match=message):
        convert(saved(tmp_path / "gqa", **changes), tmp_path / "mla")
    assert [path.name for path in tmp_path.iterdir()] == ["gqa"]


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(EvalError, match="is a llama checkpoint: only Qwen2"):
        convert(tmp_path / "llama", tmp_path / "mla")
    with pytest.raises(EvalError, match="has no config.json"):
        convert(tmp_path, tmp_path / "mla")
    source = saved(tmp_path / "gqa")
    config = json.loads((source / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "is a Qwen2ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised"),
    ):
        (source / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(EvalError, match=message):
            convert(source, tmp_path / "mla")
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").unlink()
    with pytest.raises(EvalError, match="has no safetensors files"):
        convert(source, tmp_path / "mla")


def test_missing_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "gqa") / "model.safetensors"
    weights = load_file(file)
    missing = {name: weight for name, weight in weights.items() if "layers.1.self_attn.v_proj.bias" not in name}
    save_file(missing, file)
    with pytest.raises(EvalError, match="lacks 1 weights, model.layers.1.self_attn.v_proj.bias first"):
        convert(file.parent, tmp_path / "mla")
    broken = "model.layers.0.self_attn.k_proj.weight"
    save_file(weights | {broken: torch.full_like(weights[broken], torch.nan)}, file)
    with pytest.raises(EvalError, match="differs by nan"):
        convert(file.parent, tmp_path / "mla")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(EvalError, match="model.safetensors cannot be read"):
        convert(file.parent, tmp_path / "mla")
    assert [path.name for path in tmp_path.iterdir()] == ["gqa"]


def test_the_target_is_never_overwritten_nor_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "gqa")
    (tmp_path / "mla").mkdir()
    with pytest.raises(EvalError, match="exists: give a path that does not"):
        convert(source, tmp_path / "mla")
    with pytest.raises(EvalError, match="is no directory: make it first"):
        convert(source, tmp_path / "deeper" / "mla")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 5, 5))
    with pytest.raises(EvalError, match="needs 0.0 GB, and .* has 0.0 GB free"):
        convert(source, tmp_path / "other")
    monkeypatch.undo()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(EvalError, match="No space left on device"):
        convert(source, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gqa", "mla"]
