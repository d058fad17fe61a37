"""Which tests hold only with transformers 5, and why; all others hold with 4.57 too."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Only5(NamedTuple):
    """Tests that hold only with transformers 5."""

    why: str  # shown where they are skipped
    # By file. A test's name stands for all of its parameters, unless those that differ follow it.
    tests: dict[str, str]


ONLY_5 = (
    Only5(
        "4.57 chooses BERT's and RoBERTa's attention from a table of classes, which fuse leaves as "
        'it is: these models keep attn_implementation="sdpa".',
        {
            "test_huggingface.py": """
                test_a_configuration_that_a_module_around_models_holds
                test_a_configuration_that_holds_those_of_models
                test_a_model_around_one_that_is_fused
                test_bert_activations test_fuse_keeps_everything_else test_gradients[bert
                test_hidden_states[bert test_models_that_need_something_else_are_left
                test_models_that_share_a_configuration test_nested_in_another_module
                test_padding_travels_as_it_is
            """,
            "test_huggingface_models.py": "test_a_part_of_a_fused_model_and_one_that_was_reverted",
            "test_fuse_padding.py": "test_another_attention test_models_that_never_do",
            "test_nn_packing.py": "test_transformers_encoder_alone_and_after_revert",
            "test_recipes.py": "test_a_hooked_norm_is_called",
            "test_unpad_recipes.py": "test_an_encoder_as_a_decoder",
        },
    ),
    Only5(
        "4.57's models of BERT's kind do more around their encoder than 5's, and are called as "
        "transformers wraps them: no recipe knows their code.",
        {
            "test_direct_models.py": """
                test_a_first_call_with_gradients test_a_model_in_another_dtype
                test_a_plan_does_not_keep_its_model_alive
                test_another_way_to_count_positions_is_noticed
                test_another_way_to_make_masks_is_noticed test_any_change_is_noticed
                test_any_other_call_is_transformers test_attempts_to_plan_become_rare
                test_copies_pickles_compiles_and_reverts
                test_errors_and_other_types_are_transformers
                test_gradients_are_needed_in_one_parameter
                test_gradients_flow test_has_the_results_of_transformers
                test_hidden_states_were_requested_before test_hooks_run
                test_inside_a_model_with_a_head test_methods_replaced_in_a_class_run
                test_models_that_leave_padding_out_run_in_one_call_without_it
                test_one_call_has_the_bits_of_the_parts
                test_segments_that_were_changed_and_are_zero_again
                test_tokens_with_a_nan_or_other_masks test_training_and_evaluating_again
                test_transforms_and_modes_are_the_parts
                test_weights_packed_for_another_instruction_set_are_not_read
            """,
        },
    ),
    Only5(
        "BERT's and RoBERTa's embeddings have other arguments and other code in 4.57, which no "
        "recipe knows.",
        {
            "test_embeddings.py": """
                test_a_new_module_is_served_again test_a_whole_model test_has_the_bits_of_its_parts
                test_sees_new_weights test_takes_embeddings_instead_of_words
                test_the_parts_run_for_gradients test_the_parts_run_if_something_changed
                test_tokens_after_others
            """,
        },
    ),
    Only5(
        "BERT's layers return tuples in 4.57, and its embeddings have other code: they run as "
        "their parts, not as one node of the graph.",
        {
            "test_post_norm.py": """
                test_a_checkpoint_computes_the_same test_a_single_gradient
                test_a_weight_changed_before_the_backward_is_noticed test_activations
                test_an_encoder_with_one_layer_less test_batched_gradients
                test_copies_and_saved_models test_embeddings
                test_gradients_with_a_graph_of_what_is_shared_or_watched
                test_layers_of_a_kind_that_is_not_known test_layers_without_biases
                test_one_kind_of_dropout test_other_weights_and_rates_take_effect
                test_results_are_those_of_the_parts test_second_derivatives
                test_second_derivatives_of_embeddings test_segments_of_a_buffer_that_is_not_zero
                test_sums_of_rows_are_rounded_once test_what_watches_or_changes_a_layer
                test_without_gradients
            """,
        },
    ),
    Only5(
        "4.57's BERT reads whether a mask has padding.",
        {"test_huggingface.py": "test_masks_without_values_are_not_read[bert"},
    ),
    Only5(
        "4.57's encoders keep their hidden states in their own code, which goes on without "
        "padding; 5 records them by hooks, which end that.",
        {
            "test_fuse_padding.py": """
                test_hidden_states_are_asked_for_once test_hidden_states_recorded_from_outside
                test_hooks_come_and_go
            """,
            "test_unpad_decoders.py": "test_hidden_states_of_the_decoder",
            "test_unpad_recipes.py": "test_hidden_states[ test_obstacles",
        },
    ),
    Only5(
        "4.57's T5 writes its softmax out, and takes no attention by its name.",
        {"test_huggingface.py": "test_encoder_decoder test_generate[t5 test_gradients[t5"},
    ),
    Only5(
        "4.57's Falcon adds ALiBi to its mask in a method of another form, as a matrix.",
        {"test_distance_biases.py": "test_no_matrix_is_made[Falcon test_alibi_of_many_keys"},
    ),
    Only5(
        "4.57's ModernBERT has functions of attention in a table of its own, which takes no other "
        "by its name; and the code of its layers differs.",
        {
            "test_huggingface.py": "test_gradients[modernbert test_hidden_states[modernbert",
            "test_rotary_layers.py": """
                test_halves_that_do_not_fit_are_reported test_modern_bert
            """,
        },
    ),
    Only5(
        "4.57's MobileBERT, X-MOD, LiLT and ESM with rotary positions have code that isn't known "
        "to keep tokens apart: they compute padding.",
        {
            "test_unpad_recipes.py": """
                test_a_language_for_each_text test_family[Esm_rotary
                test_family[Lilt test_family[MobileBert test_family[Xmod
                test_attention_weights_that_the_code_keeps[Lilt
                test_hidden_states_that_the_code_keeps[Lilt test_training[Lilt
                test_what_a_layer_returns_is_unpacked_with_its_hidden_states
            """,
        },
    ),
    Only5(
        "The norm after the layers of 4.57's ViT is another module's, and the modules of its "
        "layers have other names.",
        {
            "test_families.py": "test_norms_that_stay_are_reported_with_the_reason",
            "test_layer_boundaries.py": """
                test_results_gradients_copies_and_the_way_back[ViT
                test_results_in_inference_mode[ViT
            """,
        },
    ),
    Only5(
        "The table in the docs is that of transformers 5.",
        {"test_families.py": "test_the_table_in_the_docs_is_true"},
    ),
    Only5(
        "DETR's attention is a module of its own in 4.57, which the report names.",
        {"test_fuse_report.py": "test_detr"},
    ),
    Only5(
        "The test calls functions of transformers with arguments, or under names, that 4.57 lacks.",
        {
            "test_huggingface.py": """
                test_mask_means_what_transformers_means
                test_padding_is_read_only_where_that_is_free
            """,
            "test_huggingface_models.py": """
                test_a_model_with_both_kinds_is_right
                test_layers_that_call_themselves_causal_and_get_no_mask
            """,
        },
    ),
    Only5(
        "4.57's models that compute their attention themselves make their masks themselves too: "
        "with any name they compute what they do with eager, or can't fill their scores.",
        {
            "test_huggingface_models.py": """
                test_what_computes_its_attention_is_refused_when_it_makes_a_mask
                test_what_computes_its_attention_is_refused_when_made_or_is_right
            """,
        },
    ),
    Only5(
        "In 4.57 BLOOM is refused for another reason.",
        {"test_unpad_causal.py": "test_a_model_that_writes_its_attention_out_computes_padding"},
    ),
    Only5(
        "4.57's mixtures of experts have code of their own for their experts, where 5 has an "
        "interface: they compute padding.",
        {
            "test_unpad_causal.py": """
                test_experts test_experts_of_another_library_compute_padding
                test_results_and_gradients[Mixtral test_a_prompt_fills_the_cache[Mixtral
                test_results_and_gradients[Qwen2Moe test_a_prompt_fills_the_cache[Qwen2Moe
                test_results_and_gradients[Olmoe test_a_prompt_fills_the_cache[Olmoe
                test_results_and_gradients[Phimoe test_a_prompt_fills_the_cache[Phimoe
                test_results_and_gradients[GptOss test_a_prompt_fills_the_cache[GptOss
                test_results_and_gradients[Deepseek test_a_prompt_fills_the_cache[Deepseek
                test_generation[GptOss test_generation[Deepseek
            """,
        },
    ),
    Only5(
        "4.57's StableLM, Nemotron and DiffLlama write their attention out, as BLOOM does, and the "
        "attention of its NLLB-MoE isn't plain.",
        {
            "test_unpad_causal.py": """
                test_results_and_gradients[StableLm test_a_prompt_fills_the_cache[StableLm
                test_results_and_gradients[Nemotron test_a_prompt_fills_the_cache[Nemotron
                test_results_and_gradients[DiffLlama test_a_prompt_fills_the_cache[DiffLlama
            """,
            "test_unpad_decoders.py": "test_experts_with_a_capacity_get_padding_and_its_mask",
        },
    ),
    Only5(
        "The layers of 4.57's GLM-4V rotate by positions of three numbers each: they compute "
        "padding.",
        {
            "test_unpad_causal.py": """
                test_a_prompt_fills_the_cache[Glm4vText test_results_and_gradients[Glm4vText
            """,
        },
    ),
    Only5(
        "4.57's GPT-BigCode keeps its keys in the cache of an encoder-decoder.",
        {"test_unpad_causal.py": "test_a_prompt_fills_the_cache[GPTBigCode"},
    ),
    Only5(
        "The sum at the end of a layer of 4.57's Swin stays torch's.",
        {"test_families.py": "test_no_norm_and_no_sum_of_a_layer_stay_torchs[Swin]"},
    ),
    Only5(
        "4.57 can't add the mask of a BERT that is a decoder to scores in float64.",
        {"test_nn_packing.py": "test_transformers_decoders_are_not_packed"},
    ),
    Only5(
        "The layers of 4.57's static cache don't count the tokens that they hold.",
        {
            "test_rotary_caches.py": """
                test_a_call_that_is_declined_leaves_the_cache[Static
                test_a_static_cache_whose_rows_share_memory_is_not_written
                test_masks_of_a_layer_after_others[Static
            """,
            "test_rotary_layers.py": """
                test_generation[Llama-static test_generation[Phi3-static
                test_generation[Qwen2-static test_generation[Qwen3-static
                test_generation[Olmo2-static test_generation[Olmo3-static
                test_generation[Exaone4-static test_generation[SmolLM3-static
                test_generation[Cohere-static test_generation[Cohere2-static
                test_generation[Glm-static test_generation[Glm4-static
                test_generation[Helium-static test_generation[Ernie4_5-static
                test_with_a_static_cache
            """,
        },
    ),
    Only5(
        "4.57's static cache takes its dtype from the keys alone, and raises under autocast, where "
        "values have another.",
        {"test_rotary_caches.py": "test_autocast[Static test_generation_under_autocast"},
    ),
    Only5(
        "4.57's Data2Vec has other code than BERT's around its embeddings.",
        {
            "test_unpad_recipes.py": """
                test_family[Data2VecText test_a_model_embeds_real_tokens_only[Data2VecText
            """,
        },
    ),
    Only5(
        '4.57\'s Gemma 2 leaves the cap of its scores out with "sdpa", its default.',
        {"test_generation.py": "test_tokens_and_logits[Gemma2ForCausalLM"},
    ),
    Only5(
        "ViT's layers have another name in 4.57.",
        {"test_families.py": "test_sums_of_layers_that_are_left_are_reported"},
    ),
    Only5(
        "4.57 can't add MPT's mask to scores in float64.",
        {"test_recipes_written_out.py": "test_float64[Mpt"},
    ),
    Only5(
        "4.57 lacks the model.",
        {
            "test_families.py": """
                test_attention_by_name[Gemma4Text test_attention_by_name[Mistral4
                test_attention_by_name[NanoChat
                test_no_norm_and_no_sum_of_a_layer_stay_torchs[Gemma4Text
                test_no_norm_and_no_sum_of_a_layer_stay_torchs[Mistral4
                test_no_norm_and_no_sum_of_a_layer_stay_torchs[NanoChat
                test_results_and_gradients[Gemma4Text test_results_and_gradients[Mistral4
                test_results_and_gradients[NanoChat
                test_what_stays_torchs_in_training[Gemma4Text
                test_what_stays_torchs_in_training[Mistral4
                test_what_stays_torchs_in_training[NanoChat
            """,
            "test_unpad_causal.py": """
                test_a_prompt_fills_the_cache[Mistral4 test_layers_that_read_the_keys_of_others
                test_results_and_gradients[Mistral4
            """,
            "test_rotary_layers.py": "test_an_encoder_with_llamas_code",
            "test_unpad_recipes.py": "test_family[NomicBert test_family[EuroBert",
        },
    ),
)


def is_4() -> bool:
    """Returns whether the installed version is older than 5."""
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    return int(transformers.__version__.split(".")[0]) < 5


def check_that_it_is_the_oldest() -> None:
    """Raises an error unless the version that is imported is the oldest that pyproject.toml allows.

    ``make test-oldest-transformers`` runs tests with that version.
    """
    import transformers

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = set(re.findall(r'"transformers>=([\d.]+),', project))
    version = transformers.__version__
    if not version.startswith(f"{oldest}."):
        raise pytest.UsageError(f"{transformers.__file__} is {version}; expected {oldest}")


def mark(items: list[Any]) -> None:
    """Skips the tests of transformers 5 if the installed version is older."""
    if not is_4():
        return
    for item in items:
        name = item.name.replace(" ", "_")
        for why, tests in ONLY_5:
            known = tests.get(item.path.name, "").split()
            if name.partition("[")[0] in known or any(
                name.startswith(each) for each in known if "[" in each
            ):
                item.add_marker(pytest.mark.skip(reason=why))
