"""A part of ONNX's backend tests passes, and what tunerd cannot take is refused in a sentence."""

from __future__ import annotations

import pytest

from lab.models import backend_suite
from tests.lib import IS_NIGHTLY

PASSED: tuple[str, ...] = (
    "test_affine_grid_2d_expanded",
    "test_attention_causal_boolmask_nan_robustness",
    "test_bitshift_left_int32_shift_ge_width",
    "test_col2im_strides",
    "test_compress_1",
    "test_deform_conv_with_multiple_offset_groups",
    "test_det_nd",
    "test_dft_opset19",
    "test_div_int8",
    "test_gru_batchwise",
    "test_isinf_negative",
    "test_layer_normalization_3d_axis1_epsilon",
    "test_linear_attention_gated",
    "test_lstm_batchwise",
    "test_lstm_with_peepholes",
    "test_maxpool_with_argmax_2d_precomputed_pads",
    "test_mod_uint16",
    "test_nllloss_NCd1_mean_weight_negative_ii",
    "test_nonmaxsuppression_two_classes",
    "test_pow_types_int64_int64",
    "test_qlinearconv",
    "test_reduce_max_bool_inputs",
    "test_resize_downsample_sizes_nearest_not_smaller",
    "test_rms_normalization_2d_axis0",
    "test_rotary_embedding",
    "test_sequence_model3",
    "test_spacetodepth_crd_mode_example",
    "test_stft_with_window",
    "test_tfidfvectorizer_tf_uniandbigrams_skip5",
    "test_tile",
    "test_top_k_same_values_2d",
)
if not IS_NIGHTLY:
    PASSED = PASSED[::3]
REFUSED = {
    "test_if_seq": "is not a tensor",
    "test_unique_sorted_with_axis": "depends on the values of the inputs",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    names = {*PASSED, *REFUSED}
    tests = [(kind, test) for kind, test in backend_suite._tests() if test.name in names]
    return {t.name: backend_suite.run_case(backend_suite._read(k, t)) for k, t in tests}


@pytest.mark.parametrize("name", PASSED)
def test_a_case_passes(outcomes: dict[str, dict[str, object]], name: str) -> None:
    assert outcomes[name]["outcome"] == "passed", outcomes[name]["detail"]


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_a_case_is_refused(outcomes: dict[str, dict[str, object]], name: str, said: str) -> None:
    assert outcomes[name]["outcome"] == "refused"
    assert said in str(outcomes[name]["detail"])
