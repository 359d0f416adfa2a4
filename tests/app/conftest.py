"""The page of the app, which takes seconds to start, once for all tests."""

import pytest
import transformers

from tests.app.served import serving
from tests.explaining.test_regions import yolos
from tests.pairs import save_siglip

UNKNOWN = "vit_small_patch16_224.augreg_in21k_ft_in1k"  # not in the cache of the tests, which are offline


@pytest.fixture(scope="session")
def siglip(tmp_path_factory) -> str:
    return str(save_siglip(tmp_path_factory.mktemp("siglip")))


@pytest.fixture(scope="session")
def detector(tmp_path_factory) -> str:
    """A small YOLOS with random weights, in a folder with its processor."""
    path = tmp_path_factory.mktemp("yolos")
    yolos().save_pretrained(path)
    transformers.YolosImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def page(tmp_path_factory, siglip, detector):
    """The page as a process of its own serves it."""
    pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
    with serving(tmp_path_factory.mktemp("gradio"), "demo", siglip, detector, UNKNOWN) as served:
        yield served
