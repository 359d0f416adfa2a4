"""Preprocessing as one value: what is cut is what is normalised, in colour and in grey."""

import numpy as np
import pytest

from vitflow.images.preprocessing import InputSpec, Preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("fit", ["crop", "squash", "pad", "native"])
def test_the_model_input_is_the_cut_normalised(fit):
    image = np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    preprocessing = Preprocessing(InputSpec((32, 32), 3, MEAN, STD, crop_pct=0.9, patch_size=(8, 8)), fit)
    placement = preprocessing.place((50, 90))
    cut = preprocessing.cut(image, placement)
    assert cut.dtype == np.uint8
    assert cut.shape == (*placement.input_size, 3)
    expected = (cut.astype(np.float64) / 255 - MEAN) / STD
    prepared = preprocessing.prepare(image, placement)
    assert prepared.dtype == np.float32
    np.testing.assert_allclose(prepared, expected.transpose(2, 0, 1), atol=1e-5)


def test_a_grey_model_sees_luminance():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    grey = Preprocessing(InputSpec((32, 32), 1, (0.5,) * 3, (0.5,) * 3))
    luminance = np.round(0.299 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2])
    actual = grey.prepare(image, grey.place((32, 32)))
    assert actual.shape == (1, 32, 32)
    np.testing.assert_allclose(actual[0], luminance / 127.5 - 1.0, atol=1e-5)
