"""Sizes of tiny models: arguments of their configurations."""

from __future__ import annotations

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
BERT_SIZES = SIZES | {"max_position_embeddings": 24}
PADDED_SIZES = SIZES | {"max_position_embeddings": 64, "pad_token_id": 0}
# As DistilBERT's configuration calls them.
DISTILBERT_SIZES = {
    "vocab_size": 97,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
}
GROUPED_QUERIES = {"num_key_value_heads": 2, "max_position_embeddings": 64}
# Two of four experts for each token; configurations name the number of experts in several ways.
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
# DeepSeek's latent attention, and its routers, which choose a group of experts first.
DEEPSEEK_SIZES = (
    SIZES
    | EXPERTS
    | {
        "max_position_embeddings": 64,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
)
GEMMA4_SIZES = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
ERNIE_EXPERTS = EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
# One layer has two attentions, and two experts that return what they get.
LONGCAT_EXPERTS = {
    "num_layers": 1,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "head_dim": 8,
}
# Queries are scaled by their positions, and begin to differ at the fourth.
GROWING_SCORES = {
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4,
    },
}
# The positions of images in texts have three numbers. transformers 4.57 takes the second of the two
# for the first.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SECTIONS = {"rope_parameters": _ROPE, "rope_scaling": _ROPE}
TINY_ELMO = {
    "char_embedding_dim": 4,
    "filters": ((1, 4), (3, 8)),
    "n_highway": 1,
    "max_characters_per_token": 8,
    "activation": "tanh",
    "lstm_dim": 16,
    "projection_dim": 8,
    "dropout": 0.0,
}
# As GPT-2's configuration calls them.
GPT_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
# As BART's configuration calls them.
TRANSLATION_SIZES = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
# As T5's configuration calls them.
T5_SIZES = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
# As ViT's configuration calls them, for images of 16 by 16 pixels.
VIT_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
# As Swin's configuration calls them, for one stage of two layers; the second shifts its windows.
SWIN_SIZES = {
    "embed_dim": 16,
    "depths": [2],
    "num_heads": [2],
    "window_size": 4,
    "image_size": 16,
    "patch_size": 2,
    "drop_path_rate": 0.0,
}
# As Whisper's configuration calls them, for spectra of 20 frames.
WHISPER_SIZES = TRANSLATION_SIZES | {
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As OPT's configuration calls them.
OPT_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
# DeBERTa-v2's attention by distances; these sizes have 4 buckets of distances on each side.
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}
# The names of sizes in BLOOM's configuration.
BLOOM_SIZES = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}
# The names of sizes in MPT's configuration.
MPT_SIZES = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
# Sizes of wav2vec2 and HuBERT. Their two convolutions make a frame of about four samples.
SPEECH_SIZES = {name: size for name, size in PADDED_SIZES.items() if "position" not in name} | {
    "conv_dim": (32, 32),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
}
