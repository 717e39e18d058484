"""Every property fails a kernel with the fault that it is meant for, by each of its questions."""

import dataclasses

import pytest

from attncheck.probes import PROBES
from attncheck.relations import RELATIONS

# Lines of: module.test question fault [family, else the first] [dtype, else fp32]
PLANTED = """
softmax.softmax_is_exact compare SoftmaxPadded
softmax.shift_and_order_of_scores softmax_shift SoftmaxWithoutMaximum
softmax.shift_and_order_of_scores softmax_columns SoftmaxOfWholeTiles
softmax.rows_alone_decide softmax_rows LastRowBlind
softmax.rows_alone_decide repeat Unsteady
softmax.weights_add_up_to_one ones LoopFloor32 causal bf16
softmax.order_of_keys_does_not_matter key_permutation LoopFloor
softmax.shift_of_keys_leaves_out key_shift TailKeysAtZero
softmax.saturated_row_is_a_value one_hot NextKeysValue
causal.attention_is_exact compare MaskSkippedWhenWhole
causal.rows_see_their_keys decode RowBelow causal bf16
causal.rows_see_their_keys isolated TopLeft causal_bottom_right
causal.future_keys_do_not_matter future_keys RowBelow
causal.first_row_is_the_first_value first_row Interleaved
window.attention_is_exact compare WindowWider
window.rows_see_their_keys decode WindowWider sliding_window bf16
window.rows_see_their_keys isolated WindowWider
window.far_keys_do_not_matter hidden_keys WindowWider
window.far_keys_do_not_matter future_keys RowBelow
window.window_beyond_the_length_is_none window_beyond WindowWraps
prefix_lm.attention_is_exact compare PrefixShorter
prefix_lm.rows_see_their_keys decode PrefixShorter prefix_lm bf16
prefix_lm.rows_see_their_keys isolated PrefixShorter
prefix_lm.prefix_of_nothing_and_of_everything prefix_zero PrefixAtLeastTwo
prefix_lm.prefix_of_nothing_and_of_everything prefix_full PrefixShorter
document.attention_is_exact compare DocumentsIgnored
document.rows_see_their_keys decode DocumentsIgnored document bf16
document.rows_see_their_keys isolated DocumentsIgnored
document.documents_one_by_one documents DocumentsIgnored
document.other_documents_do_not_matter hidden_keys DocumentsIgnored
neighborhood.attention_is_exact compare OneLineLess
neighborhood.rows_see_their_keys decode OneLineLess neighborhood bf16
neighborhood.rows_see_their_keys isolated CanvasIgnored
neighborhood.far_cells_do_not_matter hidden_keys CanvasIgnored
neighborhood.orders_of_cells_agree neighborhood_order CellsRowByRow
varlen.attention_is_exact compare DocumentsIgnored
varlen.rows_see_their_keys decode SameLengths documents bf16
varlen.rows_see_their_keys isolated DocumentsIgnored packed
varlen.documents_one_by_one documents SameLengths documents
varlen.other_documents_do_not_matter hidden_keys DocumentsIgnored documents
varlen.positions_reach_score_mods compare ScoreModIgnored
varlen.beside_empty_documents_it_is_exact compare EmptyOneShifts
varlen.documents_without_keys_are_zero empty_rows EmptyRowsMean
varlen.a_lone_document_is_exact compare LoopFloor
varlen.gradients_are_exact compare gradients.MaskForgotten
varlen.gradients_beside_empty_documents compare gradients.UnseenKeysLeft
varlen.many_documents_are_exact compare BottomRight packed bf16
fp8.attention_is_exact compare QueryDescaleTwice document e5m2
fp8.decoding_is_exact compare QueryDescaleTwice full e4m3
fp8.grouped_queries_are_exact compare NextHeadsKeyDescale causal e4m3
fp8.sequences_are_exact compare FirstSequencesDescale padding e5m2
fp8.a_sink_is_exact compare SinkDescaled full e4m3
fp8.small_weights_are_kept compare WeightsNotScaled full e4m3
fp8.small_weights_are_kept two_level WeightsNotScaled full e4m3
fp8.pages_are_exact compare PagedFirstDescale padding e4m3
fp8.descales descale QueryDescaleTwice document e5m2
fp8.values_are_linear zero_values Biased full e4m3
fp8.values_are_linear values_scaled ValuesClamped full e4m3
fp8.exact_sums decode WithoutValueDescale full e4m3
fp8.exact_sums ramp NextHeadsValueDescale full e5m2
fp8.exact_sums ones FirstSequencesDescale full e4m3
decode.attention_is_exact compare MergedWithoutWeights
decode.attention_is_exact compare EmptySplitCounts padding bf16
decode.rows_see_their_keys decode LastSplitDropped full bf16
decode.groups_are_exact compare Interleaved
decode.distances_are_exact compare ScoreOffsetForgotten
decode.decoding_is_the_end_of_prefill prefill_rows OffsetForgotten
decode.decoding_is_biased_as_prefill_is prefill_rows ScoreOffsetForgotten
decode.splits_do_not_matter launches OtherLaunchDropsKeys
decode.hidden_keys_do_not_matter hidden_keys LocalKeys
decode.stale_keys_may_be_nan hidden_keys_nan HiddenTimesZero
decode.sequences_without_keys_are_zero empty_rows EmptyRowsNan
score_mods.library_is_exact compare BiasNotScaled
score_mods.chains_are_exact compare ScoreModIgnored
score_mods.expressions_are_exact compare BiasNotScaled
score_mods.endless_cap_is_none softcap_infinite SoftcapAtMost50
compositions.attention_is_exact compare LastPartIgnored
compositions.rows_see_their_keys decode LastPartIgnored composition bf16
compositions.rows_see_their_keys isolated RowBelow expression
compositions.masks_with_score_mods compare ScoreModIgnored
shapes.ragged_lengths_are_exact compare NotRescaled full bf16
shapes.ragged_lengths_are_exact decode TailKeysAtZero32
shapes.extreme_head_dims_are_exact compare GarbageDims
shapes.rows_alone_are_rows_of_all rectangular TopLeft
shapes.split_and_merge split_merge Base2Lse
shapes.padded_dims pad_head_dim GarbageDims
shapes.padded_dims pad_value_dim LastColumnLost
gqa.attention_is_exact compare Interleaved
gqa.groups_equal_repeated_heads gqa_repeat Interleaved
lse.zero_query_counts_keys zero_query Base2Lse
lse.shift_of_logits_shifts_it logit_shift Base2Lse
lse.levels_of_logits negative MaximumFromZero
lse.levels_of_logits positive UnscaledLse
lse.levels_of_logits two_level TailKeysAtZero
masked_rows.empty_rows_are_zero empty_rows EmptyRowsLseInf causal_bottom_right
masked_rows.empty_rows_are_zero empty_rows Sentinel causal_bottom_right bf16
masked_rows.rows_beside_them_are_exact compare PaddingSeen
poison.nan_in_hidden_keys hidden_keys_nan HiddenTimesZero
poison.nan_in_hidden_keys_of_a_backward hidden_keys_nan gradients.HiddenTimesZero causal fp16
poison.huge_hidden_keys hidden_keys_huge HiddenKeysOverflow
poison.nan_in_the_future future_keys_nan HiddenTimesZero
poison.huge_future future_keys_huge HiddenKeysOverflow
dtypes.every_distribution_is_exact compare RoundedScores
dtypes.every_distribution_is_exact compare RoundedWeights full bf16
dtypes.large_logits_are_exact compare MaximumFromZero
dtypes.values_are_linear values_scaled ValuesClamped
dtypes.values_are_linear values_added OutSaturates
dtypes.values_are_linear zero_values Biased
dtypes.scale_may_be_in_the_query scaled_query ScaleIgnored
dtypes.descales descale WithoutValueDescale causal e4m3
dtypes.exact_sums ramp LoopFloor
dtypes.exact_sums mean OutRoundedTwice full bf16
determinism.two_runs_agree repeat Unsteady
determinism.two_runs_agree call_order LeavesTraces
determinism.masks_are_not_kept mask_order MaskKeptByShape
determinism.alone_equals_in_a_batch alone_in_batch BatchDependent
determinism.order_of_heads_and_sequences head_permutation HeadsApart
determinism.order_of_heads_and_sequences batch_permutation HeadsApart
block_mask.attention_is_exact compare OneBlockSkipped
block_mask.attention_is_exact compare FirstKeyDecides document bf16
block_mask.launches_agree launches OtherLaunchWrong
block_mask.nan_in_hidden_blocks hidden_keys_nan HiddenTimesZero
block_mask.blocks_of_empty_rows compare EmptyBlocksSeeOne
block_mask.blocks_of_empty_rows empty_rows EmptyRowsNan causal_bottom_right
sink.attention_with_a_sink_is_exact compare SinkIgnored
sink.attention_with_a_sink_is_exact compare SinkScaled causal
sink.attention_with_a_sink_is_exact compare NextHeadsSink full bf16
sink.attention_with_a_sink_is_exact compare SinkTakenForLog2 padding bf16
sink.attention_with_a_sink_is_exact compare SinkTwice sliding_window
sink.attention_with_a_sink_is_exact compare SinkNotInLse causal bf16
sink.score_mods_are_not_for_the_sink compare SinkUnderTheScoreMod
sink.large_sinks_are_exact compare SinkClamped
sink.rows_without_keys_have_the_sink_alone compare EmptyRowsWithoutSink
sink.hidden_keys_do_not_matter hidden_keys SinkOfAllKeys
sink.each_head_has_its_own head_permutation SinkOfTheFirstHead
sink.it_is_one_key split_merge SinkPerKey
paged.attention_is_exact compare PageOneLonger
paged.attention_is_exact compare MaskOfPlaces causal_bottom_right
paged.decoding_is_exact compare EntriesBeyondRead padding
paged.rows_see_their_keys decode TailRead padding bf16
paged.pages_may_lie_anywhere pages PagesTransposed
paged.pages_may_lie_anywhere pages KeptByPage
paged.stale_values_do_not_matter hidden_keys_nan StaleTimesZero
paged.shared_pages_are_exact compare SharedIsTheFirstOnes
paged.grouped_queries_are_exact compare Interleaved
backward.gradients_are_exact compare gradients.WindowForgotten sliding_window bf16
backward.gradients_are_exact compare gradients.LseLossIgnored
backward.through_score_mods compare gradients.SlopeForgotten causal bf16
backward.captured_gradients compare gradients.CapturedSlopeForgotten
backward.captured_gradients compare gradients.CapturedOfAnotherHead full
backward.captured_gradients compare gradients.CapturedOfOneSequence causal bf16
backward.captured_gradients compare gradients.CapturedWithoutDelta full bf16
backward.captured_gradients compare gradients.CapturedTwice
backward.with_a_sink compare gradients.SinkWithoutGradient
backward.groups_are_summed compare gradients.FirstOfTheGroup causal bf16
backward.groups_are_summed group_sums gradients.FirstOfTheGroup
backward.no_loss_has_no_gradients zero_loss gradients.NotCleared
backward.lse_alone_moves_no_values lse_loss gradients.LseInValues
backward.query_and_key_gradients_belong_together euler gradients.KeysNotScaled
backward.a_shift_of_keys_leaves_them key_shift gradients.NoDelta
backward.keys_in_another_order key_permutation gradients.LastKeyLost
backward.heads_and_sequences_know_no_place head_permutation gradients.HeadsApart
backward.heads_and_sequences_know_no_place batch_permutation gradients.HeadsApart
backward.layouts strides_heads_last gradients.LossAsContiguous
backward.layouts strides_gapped gradients.LossAsContiguous
backward.layouts strides_packed AsContiguous
backward.layouts strides_expanded gradients.LossAsContiguous
backward.layouts strides_far WrappedOffsets
backward.runs_agree repeat gradients.Unsteady
backward.runs_agree call_order gradients.LeavesTraces
"""


ROWS = [line.split() for line in PLANTED.strip().splitlines()]
LAYOUTS = "layouts.strides_do_not_matter"


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_property_fails_its_planted_fault(suite, row):
    name, question, fault, *rest = row
    spec = suite.properties[name]
    family, dtype = [*rest, *(spec.families[0], "fp32")[len(rest) :]]
    kernel = suite.under_test(fault, family, dtype)
    case = suite.find_failure(kernel, dataclasses.replace(spec, questions=(question,)))
    assert case is not None, f"{fault} passes"
    assert case.question == question


@pytest.mark.parametrize("question", [name for name in RELATIONS if name.startswith("strides")])
def test_strides_property_fails_kernels_that_ignore_strides_or_offsets(suite, question):
    spec = dataclasses.replace(suite.properties[LAYOUTS], questions=(question,))
    faults = {"strides_offset": "OffsetIgnored", "strides_far": "WrappedOffsets"}
    fault = faults.get(question, "AsContiguous")
    assert suite.find_failure(suite.under_test(fault, "full", "fp32"), spec)


def test_every_property_and_question_has_a_planted_fault(suite):
    pairs = {(name, q) for name, spec in suite.properties.items() for q in spec.questions}
    assert {(name, question) for name, question, *_ in ROWS} == {
        pair for pair in pairs if pair[0] != LAYOUTS
    }


def test_every_relation_and_probe_is_a_question_of_a_property(suite):
    questions = {question for spec in suite.properties.values() for question in spec.questions}
    assert questions == {"compare", *RELATIONS, *PROBES}
