"""What the tiny configuration of a class needs beside small sizes, and which classes the sweep leaves out."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [4, 2, 2]}
HALF_MROPE = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
MROPE_TEXT = {"text_config": {"rope_parameters": MROPE}}
MARKS = {
    "vision_start_token_id": 150,
    "vision_end_token_id": 151,
    "audio_start_token_id": 152,
    "audio_end_token_id": 153,
}

ONE_TILE = {"image_grid_pinpoints": [[16, 16]]}
DEEPSTACK = {"deepstack_visual_indexes": [0]}

# by the name of the class, or of its configuration's class
CHANGES: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {
        "image_token_offset": 132,
        "audio_token_offset": 140,
        "vision_config": {"codebook_size": 8},
        "audio_config": {"codebook_dim": 64, "codebook_size": 8},
    },
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    "BltConfig": {"encoder_hash_byte_group_vocab": 500},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 100}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "CohereCompassConfig": {
        "text_config": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    },
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "DeepseekOcr2Config": {
        "text_config": {"num_experts_per_tok": 2, "n_routed_experts": 2, "mlp_layer_types": ["dense", "sparse"]}
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_routed_experts": 2},
    "DeepseekVLHybridConfig": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "Dots1Config": {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "Emu3Config": {"vocabulary_map": {"<image>": 100}},
    "Ernie4_5_VLMoeConfig": {
        "text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}
    },
    "FunAsrNanoConfig": {"adaptor_config": {"intermediate_size": 16}},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Glm46VConfig": {"text_config": {"rope_parameters": MROPE}},
    "Glm4vConfig": MROPE_TEXT,
    "Glm4vMoeConfig": {"text_config": {"rope_parameters": HALF_MROPE}},
    "GlmOcrConfig": MROPE_TEXT,
    "Glm5NextConfig": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
    "Granite4VisionConfig": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "2/4"},
    "HunYuanVLConfig": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}}},
    "Kimi_K25Config": {"projection_hidden_size": 64},
    "LlavaNextConfig": ONE_TILE,
    "LlavaNextVideoConfig": ONE_TILE,
    "LlavaOnevisionConfig": ONE_TILE,
    "Mamba2Config": {"num_heads": 8, "head_dim": 16},
    "Mistral4Config": {"head_dim": 32},
    "MiniCPMOcrConfig": {"image_token_id": 110},
    "MiniCPMV4_6Config": {"image_token_id": 110},
    "MiniCPMV4_7Config": {"image_token_id": 110},
    "MllamaForCausalLM": {"cross_attention_layers": [1]},
    "MllamaForConditionalGeneration": {"text_config": {"cross_attention_layers": [1]}},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [1, 0]}, "vision_config": {"image_size": [16, 16]}},
    "NemotronConfig": {"num_key_value_heads": 2},
    "NemotronH_Omni_Reasoning_V3_Config": {"vision_config": {"video_temporal_patch_size": 2}},
    "OlmoHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "PaddleOCRVLConfig": MROPE_TEXT,
    "Qwen2VLConfig": MROPE_TEXT,
    "Qwen2_5_VLConfig": MROPE_TEXT,
    "Qwen2_5OmniThinkerConfig": {**MROPE_TEXT, **MARKS},
    "Qwen3OmniMoeThinkerConfig": {**MROPE_TEXT, **MARKS, "vision_config": DEEPSTACK},
    "Cosmos3OmniConfig": {"vision_config": DEEPSTACK},
    "Qwen3VLConfig": {"vision_config": DEEPSTACK},
    "Qwen3VLMoeConfig": {"vision_config": DEEPSTACK},
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds_dim": [16, 48]},
    "Step3p7Config": {"text_config": {"sliding_window": 4096}},
    "VibeVoiceAsrConfig": {
        part: {"depths": [1, 1, 1], "downsampling_ratios": [2, 2], "num_filters": 4}
        for part in ("semantic_tokenizer_encoder_config", "acoustic_tokenizer_encoder_config")
    },
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2]},
    "ZayaConfig": {"num_experts_per_tok": 1},
}

# class: why
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("FastVlmForConditionalGeneration", "Gemma3nForConditionalGeneration", "PerceptionLMForConditionalGeneration"),
        "its vision tower needs timm",
    ),
    "DiffusionGemmaForBlockDiffusion": "denoises blocks of tokens and does not decode one after the other",
    "Dots3NoteForConditionalGeneration": "its parts do not shrink together; its text class is refused for its indexer",
    "EvollaForProteinText2Text": "its generate keeps no cache, so that no call can be sparse (the handle warns)",
    "Gemma4AssistantForCausalLM": "drafts on the cache of another model and has none",
    "Gemma4UnifiedAssistantForCausalLM": "drafts on the cache of another model and has none",
    "KyutaiSpeechToTextForConditionalGeneration": "needs an audio codec that does not shrink; refused for its window",
    "PI0ForConditionalGeneration": "moves a robot and has no generate",
    "Qwen3OmniMoeForConditionalGeneration": "its default configuration builds no talker; its thinker is in the sweep",
}
