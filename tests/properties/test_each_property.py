"""Every property fails a kernel with the fault that it is for, for each question that it asks."""

from __future__ import annotations

import dataclasses

import pytest

from attncheck.probes import PROBES
from attncheck.relations import RELATIONS

# module.test, question, fault, family if not the first, dtype if not fp32
PLANTED = """
softmax.softmax_is_exact compare calls.Softmax
softmax.shift_and_order_of_scores softmax_shift calls.SoftmaxWithoutMaximum
softmax.shift_and_order_of_scores softmax_columns calls.SoftmaxLoopFloor
softmax.rows_alone_decide softmax_rows calls.LastRowBlind
softmax.rows_alone_decide repeat calls.Unsteady
softmax.weights_add_up_to_one ones arithmetic.LoopFloor32 causal bf16
softmax.order_of_keys_does_not_matter key_permutation arithmetic.LoopFloor
softmax.shift_of_keys_leaves_out key_shift arithmetic.TailKeysAtZero
softmax.saturated_row_is_a_value one_hot misread.NextKeysValue
causal.attention_is_exact compare arithmetic.MaskSkippedWhenWhole
causal.rows_see_their_keys decode misread.RowBelow causal bf16
causal.rows_see_their_keys isolated misread.TopLeft causal_bottom_right
causal.future_keys_do_not_matter future_keys misread.RowBelow
causal.first_row_is_the_first_value first_row misread.Interleaved
window.attention_is_exact compare misread.WindowWider
window.rows_see_their_keys decode misread.WindowWider sliding_window bf16
window.rows_see_their_keys isolated misread.WindowWider
window.far_keys_do_not_matter hidden_keys misread.WindowWider
window.far_keys_do_not_matter future_keys misread.RowBelow
window.window_beyond_the_length_is_none window_beyond misread.WindowWraps
prefix_lm.attention_is_exact compare misread.PrefixShorter
prefix_lm.rows_see_their_keys decode misread.PrefixShorter prefix_lm bf16
prefix_lm.rows_see_their_keys isolated misread.PrefixShorter
prefix_lm.prefix_of_nothing_and_of_everything prefix_zero misread.PrefixAtLeastTwo
prefix_lm.prefix_of_nothing_and_of_everything prefix_full misread.PrefixShorter
document.attention_is_exact compare misread.DocumentsIgnored
document.rows_see_their_keys decode misread.DocumentsIgnored document bf16
document.rows_see_their_keys isolated misread.DocumentsIgnored
document.documents_one_by_one documents misread.DocumentsIgnored
document.other_documents_do_not_matter hidden_keys misread.DocumentsIgnored
neighborhood.attention_is_exact compare misread.WindowSmaller
neighborhood.rows_see_their_keys decode misread.WindowSmaller neighborhood bf16
neighborhood.rows_see_their_keys isolated misread.CanvasIgnored
neighborhood.far_cells_do_not_matter hidden_keys misread.CanvasIgnored
neighborhood.orders_of_cells_agree neighborhood_order misread.CellsRowByRow
varlen.attention_is_exact compare misread.DocumentsIgnored
varlen.rows_see_their_keys decode misread.SameLengths documents bf16
varlen.rows_see_their_keys isolated misread.DocumentsIgnored packed
varlen.documents_one_by_one documents misread.SameLengths documents
varlen.other_documents_do_not_matter hidden_keys misread.DocumentsIgnored documents
varlen.positions_reach_score_mods compare misread.ScoreModIgnored
varlen.beside_empty_documents_it_is_exact compare misread.EmptyOneShifts
varlen.documents_without_keys_are_zero empty_rows arithmetic.EmptyRowsMean
varlen.a_lone_document_is_exact compare arithmetic.LoopFloor
varlen.gradients_are_exact compare gradients.MaskForgotten
varlen.gradients_beside_empty_documents compare gradients.UnseenKeysLeft
varlen.many_documents_are_exact compare misread.BottomRight packed bf16
fp8.attention_is_exact compare fp8.QueryDescaleTwice document e5m2
fp8.decoding_is_exact compare fp8.QueryDescaleTwice full e4m3
fp8.grouped_queries_are_exact compare fp8.NextHeadsKeyDescale causal e4m3
fp8.sequences_are_exact compare fp8.FirstSequencesDescale padding e5m2
fp8.a_sink_is_exact compare fp8.SinkDescaled full e4m3
fp8.small_weights_are_kept compare fp8.WeightsNotScaled full e4m3
fp8.small_weights_are_kept two_level fp8.WeightsNotScaled full e4m3
fp8.pages_are_exact compare fp8.PagedFirstDescale padding e4m3
fp8.descales descale fp8.QueryDescaleTwice document e5m2
fp8.values_are_linear zero_values arithmetic.Biased full e4m3
fp8.values_are_linear values_scaled misread.ValuesClamped full e4m3
fp8.exact_sums decode fp8.WithoutValueDescale full e4m3
fp8.exact_sums ramp fp8.NextHeadsValueDescale full e5m2
fp8.exact_sums ones fp8.FirstSequencesDescale full e4m3
decode.attention_is_exact compare decode.MergedWithoutWeights
decode.attention_is_exact compare decode.EmptySplitCounts padding bf16
decode.rows_see_their_keys decode decode.LastSplitDropped full bf16
decode.groups_are_exact compare misread.Interleaved
decode.distances_are_exact compare decode.ScoreOffsetForgotten
decode.decoding_is_the_end_of_prefill prefill_rows decode.OffsetForgotten
decode.decoding_is_biased_as_prefill_is prefill_rows decode.ScoreOffsetForgotten
decode.splits_do_not_matter launches decode.OtherLaunchDropsKeys
decode.hidden_keys_do_not_matter hidden_keys decode.LocalKeys
decode.stale_keys_may_be_nan hidden_keys_nan arithmetic.HiddenTimesZero
decode.sequences_without_keys_are_zero empty_rows arithmetic.EmptyRowsNan
score_mods.library_is_exact compare misread.BiasNotScaled
score_mods.chains_are_exact compare misread.ScoreModIgnored
score_mods.expressions_are_exact compare misread.BiasNotScaled
score_mods.endless_cap_is_none softcap_infinite misread.SoftcapAtMost50
compositions.attention_is_exact compare misread.LastPartIgnored
compositions.rows_see_their_keys decode misread.LastPartIgnored composition bf16
compositions.rows_see_their_keys isolated misread.RowBelow expression
compositions.masks_with_score_mods compare misread.ScoreModIgnored
shapes.ragged_lengths_are_exact compare arithmetic.NotRescaled full bf16
shapes.ragged_lengths_are_exact decode arithmetic.TailKeysAtZero32
shapes.extreme_head_dims_are_exact compare misread.GarbageDims
shapes.rows_alone_are_rows_of_all rectangular misread.TopLeft
shapes.split_and_merge split_merge arithmetic.Base2Lse
shapes.padded_dims pad_head_dim misread.GarbageDims
shapes.padded_dims pad_value_dim arithmetic.LastColumnLost
gqa.attention_is_exact compare misread.Interleaved
gqa.groups_equal_repeated_heads gqa_repeat misread.Interleaved
lse.zero_query_counts_keys zero_query arithmetic.Base2Lse
lse.shift_of_logits_shifts_it logit_shift arithmetic.Base2Lse
lse.levels_of_logits negative arithmetic.MaximumFromZero
lse.levels_of_logits positive arithmetic.UnscaledLse
lse.levels_of_logits two_level arithmetic.TailKeysAtZero
masked_rows.empty_rows_are_zero empty_rows arithmetic.EmptyRowsLseInf causal_bottom_right
masked_rows.empty_rows_are_zero empty_rows arithmetic.Sentinel causal_bottom_right bf16
masked_rows.rows_beside_them_are_exact compare misread.PaddingSeen
poison.nan_in_hidden_keys hidden_keys_nan arithmetic.HiddenTimesZero
poison.nan_in_hidden_keys_of_a_backward hidden_keys_nan gradients.HiddenTimesZero causal fp16
poison.huge_hidden_keys hidden_keys_huge arithmetic.HiddenKeysOverflow
poison.nan_in_the_future future_keys_nan arithmetic.HiddenTimesZero
poison.huge_future future_keys_huge arithmetic.HiddenKeysOverflow
dtypes.every_distribution_is_exact compare arithmetic.RoundedScores
dtypes.every_distribution_is_exact compare arithmetic.RoundedWeights full bf16
dtypes.large_logits_are_exact compare arithmetic.MaximumFromZero
dtypes.values_are_linear values_scaled misread.ValuesClamped
dtypes.values_are_linear values_added arithmetic.OutSaturates
dtypes.values_are_linear zero_values arithmetic.Biased
dtypes.scale_may_be_in_the_query scaled_query misread.ScaleIgnored
dtypes.descales descale misread.DescaleIgnored causal e4m3
dtypes.exact_sums ramp arithmetic.LoopFloor
dtypes.exact_sums mean arithmetic.OutRoundedTwice full bf16
determinism.two_runs_agree repeat calls.Unsteady
determinism.two_runs_agree call_order calls.LeavesTraces
determinism.masks_are_not_kept mask_order calls.MaskKeptByShape
determinism.alone_equals_in_a_batch alone_in_batch calls.BatchDependent
determinism.order_of_heads_and_sequences head_permutation arithmetic.HeadsApart
determinism.order_of_heads_and_sequences batch_permutation arithmetic.HeadsApart
block_mask.attention_is_exact compare blocks.OneBlockSkipped
block_mask.attention_is_exact compare blocks.FirstKeyDecides document bf16
block_mask.launches_agree launches blocks.OtherLaunchWrong
block_mask.nan_in_hidden_blocks hidden_keys_nan arithmetic.HiddenTimesZero
block_mask.blocks_of_empty_rows compare blocks.EmptyBlocksSeeOne
block_mask.blocks_of_empty_rows empty_rows arithmetic.EmptyRowsNan causal_bottom_right
sink.attention_with_a_sink_is_exact compare sinks.Ignored
sink.attention_with_a_sink_is_exact compare sinks.Scaled causal
sink.attention_with_a_sink_is_exact compare sinks.NextHeads full bf16
sink.attention_with_a_sink_is_exact compare sinks.TakenForLog2 padding bf16
sink.attention_with_a_sink_is_exact compare sinks.Twice sliding_window
sink.attention_with_a_sink_is_exact compare sinks.NotInLse causal bf16
sink.score_mods_are_not_for_the_sink compare sinks.UnderTheScoreMod
sink.large_sinks_are_exact compare sinks.Clamped
sink.rows_without_keys_have_the_sink_alone compare sinks.EmptyRowsEmpty
sink.hidden_keys_do_not_matter hidden_keys sinks.OfAllKeys
sink.each_head_has_its_own head_permutation sinks.OfTheFirstHead
sink.it_is_one_key split_merge sinks.PerKey
paged.attention_is_exact compare paged.PageOneLonger
paged.attention_is_exact compare paged.MaskOfPlaces causal_bottom_right
paged.decoding_is_exact compare paged.EntriesBeyondRead padding
paged.rows_see_their_keys decode paged.TailRead padding bf16
paged.pages_may_lie_anywhere pages paged.Transposed
paged.pages_may_lie_anywhere pages paged.KeptByPage
paged.stale_values_do_not_matter hidden_keys_nan paged.StaleTimesZero
paged.shared_pages_are_exact compare paged.SharedIsTheFirstOnes
paged.grouped_queries_are_exact compare misread.Interleaved
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
backward.layouts strides_packed misread.AsContiguous
backward.layouts strides_expanded gradients.LossAsContiguous
backward.layouts strides_far misread.WrappedOffsets
backward.runs_agree repeat gradients.Unsteady
backward.runs_agree call_order gradients.LeavesTraces
"""


ROWS = [line.split() for line in PLANTED.strip().splitlines()]
LAYOUTS = "layouts.strides_do_not_matter"


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_a_property_fails_the_fault_it_is_for(suite, row: list[str]) -> None:
    name, question, fault, *rest = row
    asked = suite.properties[name]
    family, dtype = [*rest, *(asked.families[0], "fp32")[len(rest) :]]
    kernel = suite.under_test(fault, family, dtype)
    case = suite.failing(kernel, dataclasses.replace(asked, questions=(question,)))
    assert case is not None, f"{fault} passes"
    assert case.question == question


@pytest.mark.parametrize("question", [name for name in RELATIONS if name.startswith("strides")])
def test_strides_are_used(suite, question: str) -> None:
    asked = dataclasses.replace(suite.properties[LAYOUTS], questions=(question,))
    faults = {"strides_offset": "OffsetIgnored", "strides_far": "WrappedOffsets"}
    fault = faults.get(question, "AsContiguous")
    assert suite.failing(suite.under_test(f"misread.{fault}", "full", "fp32"), asked)


def test_every_property_and_question_has_its_fault(suite) -> None:
    asked = {(name, q) for name, each in suite.properties.items() for q in each.questions}
    assert {(name, question) for name, question, *_ in ROWS} == {
        pair for pair in asked if pair[0] != LAYOUTS
    }


def test_every_question_is_asked_by_a_property(suite) -> None:
    asked = {question for each in suite.properties.values() for question in each.questions}
    assert asked == {"compare", *RELATIONS, *PROBES}
