"""Which tests hold with transformers 5 alone; all others hold with 4.57 too.

    file: tests                                                        # why

A test's name stands for all of its parameters, unless those that differ follow it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

ONLY_5: dict[str, str] = {
    "test_direct_models.py": """
        test_any_other_call_is_transformers test_copies_pickles_compiles_and_reverts  # other models
        test_gradients_flow test_has_the_results_of_transformers test_hooks_run
        test_inside_a_model_with_a_head
    """,
    "test_distance_biases.py": """
        test_no_matrix_is_made[T5 test_no_matrix_is_made[MT5 test_no_matrix_is_made[UMT5
        test_other_uses_get_the_matrix[T5 test_other_uses_get_the_matrix[UMT5  # other code
    """,
    "test_embeddings.py": """
        test_has_the_bits_of_its_parts[Roberta test_has_the_bits_of_its_parts[XLMRoberta
        test_has_the_bits_of_its_parts[Camembert test_tokens_after_others  # arguments of 5
    """,
    "test_families.py": """
        test_the_table_in_the_docs_is_true                              # the table is that of 5
        test_each_stack_that_computes_padding_is_reported_with_the_reason
        test_norms_that_stay_are_reported_with_the_reason               # paths of ViT's modules
        test_what_stays_torchs_in_training[LayoutLM test_what_stays_torchs_in_training[MBart
        test_what_stays_torchs_in_training[Pegasus                      # a clamp ends their layers
    """,
    "test_fuse_padding.py": """
        test_another_attention test_fsdp test_lora test_lora_before_fusing  # BERT's own attention
        test_what_leaves_padding_out_is_reported test_models_that_never_do
        test_hidden_states_are_asked_for_once test_hidden_states_recorded_from_outside  # no hooks
        test_hooks_come_and_go
    """,
    "test_fuse_report.py": "test_detr test_sam",
    "test_huggingface.py": """
        test_bert_activations test_fuse_keeps_everything_else test_nested_in_another_module
        test_models_that_share_a_configuration test_models_that_need_something_else_are_left
        test_gradients[bert test_hidden_states[bert test_padding_travels_as_it_is
        test_encoder_decoder test_generate[t5 test_gradients[t5         # T5 writes its softmax out
        test_gradients[modernbert test_hidden_states[modernbert         # so does ModernBERT
        test_mask_means_what_transformers_means                         # by lengths
        test_padding_is_read_only_where_that_is_free
    """,
    "test_huggingface_models.py": """
        test_a_model_with_both_kinds_is_right
        test_layers_that_call_themselves_causal_and_get_no_mask
        test_a_part_of_a_fused_model_and_one_that_was_reverted          # BERT's own attention
        test_what_computes_its_attention_is_refused_when_it_makes_a_mask  # it makes its own
        test_what_computes_its_attention_is_refused_when_made_or_is_right
    """,
    "test_layer_boundaries.py": "test_results_gradients_copies_and_the_way_back[ViT",
    "test_recipes.py": """
        test_a_hooked_norm_is_called
        test_norms_that_take_in_the_sum_before_them[DistilBert          # other sums
        test_norms_that_take_in_the_sum_before_them[ModernBert
        test_norms_that_take_in_the_sum_before_them[Roberta
    """,
    "test_rotary_layers.py": """
        test_with_a_static_cache test_generation[Llama-static test_generation[Qwen2-static
        test_generation[Qwen3-static test_masks_of_a_layer_after_others[Static
                                                                        # its layers count no tokens
        test_modern_bert test_halves_that_do_not_fit_are_reported       # other code
        test_an_encoder_with_llamas_code                                # 4.57 lacks EuroBERT
    """,
    "test_unpad_causal.py": """
        test_models_that_get_a_mask_of_all_pairs_compute_padding
        test_texts_of_images_are_packed                                 # CLIP gets two masks
    """,
    "test_unpad_decoders.py": """
        test_a_bias_with_padding_inside_sequences
        test_a_cache_keeps_the_padding_of_the_decoder[T5                # adds its mask to its bias
        test_checkpointing_changes_no_gradient[T5 test_generation_decodes_with_its_cache[T5
        test_loss_with_labels[T5 test_teacher_forcing[T5 test_teacher_forcing[MT5
        test_teacher_forcing[UMT5 test_hidden_states_of_the_decoder
    """,
    "test_unpad_recipes.py": """
        test_a_bias_in_each_layer test_a_language_for_each_text test_an_encoder_as_a_decoder
        test_family[NomicBert test_family[EuroBert                      # 4.57 lacks these
        test_family[DistilBert test_family[LayoutLM test_family[MobileBert test_family[ModernBert
        test_family[T5Encoder test_family[Xmod test_family[Esm_rotary
        test_hidden_states test_obstacles test_windows
        test_training[DistilBert test_training[ModernBert
    """,
}


def is_4() -> bool:
    """Returns whether the installed version is older than 5."""
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    return int(transformers.__version__.split(".")[0]) < 5


def mark(items: list[Any]) -> None:
    """Skips the tests of transformers 5 if the installed version is older."""
    if not any(item.path.name in ONLY_5 for item in items) or not is_4():
        return
    skip = pytest.mark.skip(reason="holds with transformers 5 alone")
    for item in items:
        lines = ONLY_5.get(item.path.name, "").splitlines()
        names = [name for line in lines for name in line.partition("#")[0].split()]
        whole = item.name.partition("[")[0]
        if any(
            whole == name or ("[" in name and item.name.replace(" ", "_").startswith(name))
            for name in names
        ):
            item.add_marker(skip)
