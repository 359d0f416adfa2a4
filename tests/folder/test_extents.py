"""Maps of models whose patches do not tile the input keep their places in finished runs and on pages."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.recording.test_places import CONFIG, siglip
from vitflow import Explainer, explore
from vitflow.folder import BatchExplainer
from vitflow.folder.columns import placement_of, placement_row
from vitflow.images.geometry import Placement, Span
from vitflow.viewer.pages import placed_grids

EXTENT = (Span(0.0, 14.0, 0, 98), Span(-6.5, 14.0, 0, 96))


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(siglip(100, 14), data_config={**CONFIG, "input_size": (3, 100, 100)})


def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (50, 80, 3), np.uint8)


def test_a_row_has_the_extents_of_its_maps():
    even = Placement((50, 80), (100, 100), (0, 0), (100, 100))
    uneven = Placement((50, 80), (100, 100), (0, 0), (100, 100), extent=EXTENT)
    known = json.loads(json.dumps(placement_row({"random": even, "rollout": uneven})))
    assert placement_of(known, "rollout") == uneven and placement_of(known, "random") == placement_of(known) == even
    assert "extents" not in placement_row({"random": even})


def test_maps_of_a_batch_have_the_extents_of_single_maps(explainer):
    batch = BatchExplainer(lambda: explainer, methods=["rollout", "random"])
    result = batch({"image": [image()], "id": ["a"]})
    for method in ("rollout", "random"):
        saliency = explainer.explain(image(), method=method)
        grid, placement = batch.map_of(result, 0, method)
        assert placement == saliency.placement and placement.extent == (Span(0, 14, 0, 98),) * 2
        assert grid.shape == saliency.grid.shape == (7, 7)


def test_pages_draw_uneven_grids_on_their_area(explainer, tmp_path):
    Image.fromarray(image()).save(tmp_path / "a.png")
    page = explore(tmp_path / "a.png", model=explainer).html
    # 98 of 100 pixels of an image of 80 × 50.
    assert '"window": [0.0, 0.0, 78.4, 49.0]' in page and '"7,7": [0.0, 0.0, 78.4, 49.0]' in page
    placed = Placement((100, 100), (100, 100), (0, 0), (100, 100), extent=EXTENT)
    assert placed_grids([(placed, (7, 8))]) == {"window": [0, 0, 96, 98], "areas": {"7,8": [-6.5, 0, 105.5, 98]}}
