"""What is not supported is refused: the error names what was given, what is supported and what to do."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen2.modeling_qwen2 import ALL_ATTENTION_FUNCTIONS, Qwen2Attention  # noqa: F401 (Looped and Twice need both here)

import latent_santa
from latent_santa import backends
from latent_santa.patches.families import base_model, find_adapters

from .test_patch_lifecycle import SMALL, snapshot
from .tiny_models import (
    DEFAULT_ROPE,
    GROUPED,
    LATENT,
    assert_same,
    generate,
    prompt,
    scaled_up,
    tiny_model,
)

SMALL_TEXT = {
    **{name: value for name, value in GROUPED.items() if name != "head_dim"},
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "rope_parameters": DEFAULT_ROPE,
}


@pytest.fixture(scope="module", params=["deepseek_v2", "qwen2"])
def model(request):
    return tiny_model(request.param)


def refused(model, *patterns, error=NotImplementedError):
    """``patch`` refuses the model in words that match all patterns, and leaves it as it was."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        latent_santa.patch(model)
    for pattern in patterns:
        assert pattern in str(caught.value), (pattern, str(caught.value))
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "name, settings",
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ],
)
def test_sliding_window(name, settings):
    refused(tiny_model(name, **settings), "sliding window of 16 rows", "supported are")


def test_a_window_that_is_switched_off_is_no_window():
    model = tiny_model("qwen2", use_sliding_window=False, sliding_window=16)
    with latent_santa.patch(model, **SMALL) as santa:
        generate(model, prompt(30), 3)
        assert santa.sparse_calls == 3


def test_encoder_decoder():
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    refused(
        transformers.T5ForConditionalGeneration(config),
        "T5ForConditionalGeneration is an encoder-decoder",
        "supported are",
    )


def test_attention_without_separate_projections():
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    refused(
        transformers.GPT2LMHeadModel(config), "GPT2LMHeadModel has no causal attention layer", "q_proj", "supported are"
    )


def test_not_a_transformers_model():
    with pytest.raises(TypeError, match="Linear.*PreTrainedModel"):
        latent_santa.patch(nn.Linear(2, 2))


def test_remote_code(monkeypatch):
    model = tiny_model("deepseek_v2")
    remote = type(
        "DeepseekV2ForCausalLM", (type(model),), {"__module__": "transformers_modules.some.modeling_deepseek"}
    )
    model.__class__ = remote
    refused(model, "remote code", "without trust_remote_code")


def test_remote_code_without_the_attention_interface(monkeypatch):
    """A class that computes attention itself would run on unexpanded latents if it were half patched."""
    model = tiny_model("qwen2")
    own = types.ModuleType("modeling_of_somebody")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    layer = model.model.layers[1].self_attn
    layer.__class__ = type("OwnAttention", (type(layer),), {"__module__": own.__name__})
    refused(model, "model.layers.1.self_attn (OwnAttention)", "attention interface", "supported are")


def test_an_attention_interface_of_its_own():
    config = transformers.DogeConfig(**SMALL_TEXT)
    refused(transformers.DogeForCausalLM(config), "model.layers.0.self_attn (DogeAttention)", "interface of its own")


def test_cross_attention():
    config = transformers.MllamaForCausalLM.config_class(
        **{**SMALL_TEXT, "num_hidden_layers": 3}, cross_attention_layers=[1]
    )
    refused(transformers.MllamaForCausalLM(config), "model.layers.1.cross_attn", "cross-attention", "supported are")
    model = tiny_model("qwen2")
    model.model.layers[1].self_attn.is_cross_attention = True
    refused(model, "model.layers.1.self_attn (Qwen2Attention)", "cross-attention")


def test_the_base_model_has_no_head():
    text_only = transformers.MllamaForCausalLM.config_class(**SMALL_TEXT, cross_attention_layers=[])
    for model in (tiny_model("qwen2"), tiny_model("deepseek_v2"), transformers.MllamaForCausalLM(text_only)):
        for part in (model, model.model):
            assert base_model(part, find_adapters(part)) is model.model


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v2"])
def test_layers_beside_the_head_are_refused(name):
    """Where the layers' owner is no transformers model, the innermost one around them is the class with the head."""
    model = tiny_model(name)
    owner = torch.nn.Module()
    owner.embed_tokens, owner.layers, owner.norm = model.model.embed_tokens, model.model.layers, model.model.norm
    model.model = owner
    refused(model, f"{type(model).__name__} keeps its attention layers", "beside its head")


def test_a_window_of_zero_rows_is_no_window():
    config = transformers.Qwen2MoeConfig(**SMALL_TEXT, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16)
    assert config.sliding_window == 0
    latent_santa.patch(transformers.Qwen2MoeForCausalLM(config)).unpatch()


def test_attention_in_both_directions():
    config = transformers.GemmaConfig(**SMALL_TEXT, head_dim=8, use_bidirectional_attention=True)
    refused(transformers.GemmaForCausalLM(config), "no causal attention", "model.layers.0.self_attn (GemmaAttention)")


@pytest.mark.skipif(not hasattr(transformers, "GlmAsrConfig"), reason="this transformers has no GlmAsr")
def test_encoders_beside_the_language_model_are_left_alone():
    audio = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GlmAsrConfig(text_config={**SMALL_TEXT, "model_type": "llama"}, audio_config=audio)
    model = transformers.GlmAsrForConditionalGeneration(config)
    with latent_santa.patch(model) as santa:
        assert santa.layers == 2


class Looped(Qwen2Attention):
    def forward(self, *args, cache_offset=0, **kwargs):
        return super().forward(*args, **kwargs)


class Twice(Qwen2Attention):
    def forward(self, hidden_states, attention_interface, **kwargs):
        return attention_interface(hidden_states) - attention_interface(hidden_states)


@pytest.mark.parametrize(
    "kind, words",
    [(Looped, "several times per token"), (Twice, "calls the attention interface 2 times")],
)
def test_attention_that_runs_several_times(kind, words):
    model = tiny_model("qwen2")
    model.model.layers[1].self_attn.__class__ = kind
    refused(model, f"model.layers.1.self_attn ({kind.__name__})", words)


def test_rows_of_another_layer():
    model = tiny_model("qwen2")
    model.model.layers[1].self_attn.is_kv_shared_layer = True
    refused(model, "model.layers.1.self_attn (Qwen2Attention) attends to the rows of another layer")


def test_several_stacks():
    model = tiny_model("qwen2")
    model.second = tiny_model("qwen2").model
    refused(model, "several stacks", "[0, 0, 1, 1]")


def test_caches_of_more_than_rows():
    config = transformers.FalconH1Config(**SMALL_TEXT, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64)
    refused(transformers.FalconH1ForCausalLM(config), "FalconH1Model caches more than attention rows")


def test_a_cache_of_its_own(monkeypatch):
    model = tiny_model("qwen2")
    own = types.ModuleType("modeling_of_somebody")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    own.SomeCache = type("SomeCache", (DynamicCache,), {"__module__": own.__name__})
    model.model.__class__ = type("SomeModel", (type(model.model),), {"__module__": own.__name__})
    refused(model, "SomeModel keeps a cache of its own (SomeCache)")


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_weights_without_values(name):
    with torch.device("meta"):
        model = tiny_model(name)
    refused(model, "model.embed_tokens.weight is on the meta device", "load them first")


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_weights_spread_over_processes(name, tmp_path):
    tensors = pytest.importorskip("torch.distributed.tensor")
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        model = tiny_model(name)
        mesh = distributed.init_device_mesh("cpu", (1,))
        layer = model.model.layers[1].self_attn
        layer.o_proj.weight = nn.Parameter(tensors.distribute_tensor(layer.o_proj.weight, mesh, [tensors.Shard(1)]))
        refused(model, "model.layers.1.self_attn.o_proj.weight is spread over processes (a DTensor", "tp_plan")
    finally:
        distributed.destroy_process_group()


def test_a_layer_of_another_kind_refuses_the_whole_model():
    model = tiny_model("qwen2")
    model.model.layers[1].self_attn = nn.Identity()
    refused(model, "layers [0], but not in [1]", "half-patched")


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_indexer_of_its_own(name):
    config = getattr(transformers, f"{name}Config")(
        **{**LATENT, "q_lora_rank": 12},
        vocab_size=50,
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        pad_token_id=0,
    )
    refused(getattr(transformers, f"{name}ForCausalLM")(config), "indexer of its own", "supported are")


def test_softcap_and_sinks():
    for name, value, words in (
        ("attn_logit_softcapping", 30.0, "softcap"),
        ("sinks", nn.Parameter(torch.zeros(4)), "sinks"),
    ):
        model = tiny_model("llama")
        setattr(model.model.layers[0].self_attn, name, value)
        refused(model, words, "model.layers.0.self_attn (LlamaAttention)")


def test_up_projection_that_is_not_linear():
    """With a bias an expanded row is no linear function of its latent, and absorbed scores would be wrong."""
    model = tiny_model("deepseek_v2")
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = nn.Linear(old.in_features, old.out_features, bias=True)
    refused(scaled_up(model), "absorbed scores differ from expand_kv's", "kv_b_proj (Linear)")


def test_output_attentions(model):
    with latent_santa.patch(model, **SMALL):
        with pytest.raises(NotImplementedError, match="output_attentions=True.*switch it off.*shadow"):
            generate(model, prompt(20), output_attentions=True)
        generate(model, prompt(20), 2)


def test_training_with_gradients(model):
    with latent_santa.patch(model, **SMALL):
        model.train()
        try:
            with pytest.raises(NotImplementedError, match="training mode with gradients.*eval.*no_grad"):
                model(prompt(20))
            with torch.no_grad():
                model(prompt(20))
        finally:
            model.eval()
        model(prompt(20))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks(implementation):
    model = tiny_model("deepseek_v2")
    model.set_attn_implementation(implementation)
    ids = prompt(20)
    with latent_santa.patch(model, **SMALL), torch.no_grad():
        with pytest.raises(NotImplementedError, match=r"mask of shape \(1, 1, 20, 20\).*2D padding mask"):
            model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))
        with pytest.raises(NotImplementedError, match="got dict as attention_mask"):
            model(ids, attention_mask={"full_attention": None})
        with pytest.raises(ValueError, match=r"shape \(1, 19\), but 1 sequences with 20 .*need \(1, 20\)"):
            model(ids, attention_mask=torch.ones(1, 19))
        model(ids, attention_mask=torch.ones(1, 20))


def test_sequence_keys_of_the_wrong_length(model):
    with latent_santa.patch(model, **SMALL) as santa:
        santa.sequence_keys = [1, 2, 3]
        with pytest.raises(ValueError, match="sequence_keys has 3 entries for a batch of 2"):
            generate(model, prompt(20, batch=2))
        with pytest.raises(ValueError, match="3 entries for a batch of 4 sequences .beams"):
            generate(model, prompt(20), num_beams=4)
        assert santa.sparse_calls == 0
        generate(model, prompt(20, batch=3), 2)


def test_triton_on_the_cpu(model, monkeypatch):
    if importlib.util.find_spec("triton"):
        importlib.import_module("latent_santa.kernels.launch")  # while the interpreter is on: other tests need it so
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as in a user's process
    ids = prompt(30)
    wanted = generate(model, ids)
    with pytest.raises(RuntimeError, match='backend="triton" cannot run here: .*use backend="torch"'):
        latent_santa.patch(model, **SMALL, backend="triton")
    with latent_santa.patch(model, **SMALL) as santa:
        with pytest.raises(RuntimeError, match='backend="triton" cannot run here'):
            santa.configure(backend="triton")
        assert santa.config.backend == "auto"
    assert_same(generate(model, ids), wanted, 0)


def test_auto_backend_says_once_why_it_takes_torch(caplog):
    backends._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "latent_santa"):
        backends._say_once("the reason")
        backends._say_once("the reason")
    assert [r.getMessage() for r in caplog.records] == ['backend="auto": the reason; PyTorch runs instead']
