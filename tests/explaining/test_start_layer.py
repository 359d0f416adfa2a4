"""Rollout from the middle: which layers, which affinity, what is said, and what refuses it."""

import json

import numpy as np
import pytest
import timm
import torch

import vitflow
from tests.small import jitter, photo
from vitflow import Explainer
from vitflow.errors import OptionError
from vitflow.explaining.captions import departures, method_label, notes_of
from vitflow.methods.rollout import attention_rollout
from vitflow.recording.listening import Listening
from vitflow.registry.method_table import get_method
from vitflow.text.method_table import text_method


def explainer(depth: int = 12) -> Explainer:
    torch.manual_seed(depth)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=depth, embed_dim=48, num_heads=3, num_classes=3
    )
    return Explainer(jitter(model.eval(), 0.3, by_width=False))


@pytest.fixture(scope="module")
def twelve() -> Explainer:
    return explainer()


def grid(explainer: Explainer, **options) -> np.ndarray:
    return explainer.explain(photo(64, 64), **{"method": "rollout", **options}).grid


@pytest.mark.parametrize(("depth", "start"), [(6, 1), (11, 1), (12, 7), (13, 7)])
def test_the_default_is_the_middle_of_twelve_or_more_layers(depth, start):
    model = explainer(depth)
    np.testing.assert_array_equal(grid(model), grid(model, start_layer=start))
    np.testing.assert_array_equal(grid(model), grid(model, start_layer="middle"))
    assert not np.allclose(grid(model), grid(model, start_layer=start + 1))


def test_without_refinement_it_is_the_product_of_the_upper_layers(twelve):
    with vitflow.record_attention(twelve.model) as trace, torch.no_grad():
        twelve.model(twelve.pixels(photo(64, 64)))
    options = {"head_fusion": "max", "discard_ratio": 0.9, "num_prefix_tokens": 1, "readout": trace.readout}
    expected = attention_rollout(trace.attentions, start_layer=7, **options)[0, 1:].view(4, 4)
    actual = grid(twelve, refine=0, value_weighted=False)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("affinity", ["attention", "keys", "both"])
@pytest.mark.parametrize("start", ["middle", 4])
def test_a_map_does_not_depend_on_what_else_is_recorded(twelve, affinity, start):
    options, image = {"start_layer": start, "affinity": affinity}, photo(64, 64)
    single = grid(twelve, **options)
    every_layer = grid(twelve, start_layer=1, affinity=affinity)
    methods = [("rollout", options), "gae", ("rollout", {"start_layer": 1, "affinity": affinity}), "gradcam"]
    together = twelve.explain_batch([image], methods=methods)
    np.testing.assert_allclose(together[0].grid, single, rtol=1e-4)
    np.testing.assert_allclose(together[2].grid, every_layer, rtol=1e-4)
    np.testing.assert_allclose(together[1].grid, twelve.explain(image, method="gae").grid, rtol=1e-4)
    compared = vitflow.compare(image, twelve, methods=[("rollout", options)])
    np.testing.assert_allclose(compared.saliencies[0].grid, single, rtol=1e-4)


def test_the_paper_and_an_explicit_end_start_at_the_first_layer(twelve):
    np.testing.assert_array_equal(grid(twelve, preset="paper"), grid(twelve, preset="paper", start_layer=1))
    np.testing.assert_array_equal(grid(twelve, end_layer=12), grid(twelve, start_layer=1))
    np.testing.assert_array_equal(grid(twelve, end_layer=8, start_layer=3), grid(twelve, start_layer=3, end_layer=8))
    published = get_method("rollout").published
    assert published["start_layer"] == 1 and departures(get_method("rollout"), published) == ""


def test_captions_name_the_layers_and_options_keep_the_word(twelve):
    saliency = twelve.explain(photo(64, 64), method="rollout")
    assert saliency.options["start_layer"] == "middle" and saliency.facts["layers"] == [7, 12]
    assert saliency.options["refine"] == 1  # so that these tests see the affinity
    assert "Layers 7 – 12." in [*notes_of(saliency.facts)] and json.dumps(saliency.to_dict())
    assert "layers" not in explainer(6).explain(photo(64, 64), method="rollout").facts
    assert method_label("rollout", saliency.options) == "rollout"
    assert "upper half of 12 or more layers" in departures(get_method("rollout"), saliency.options)


def test_rollout_below_flow_starts_at_the_middle(twelve):
    flows = {layers: twelve.explain(photo(64, 64), method="flow", layers=layers) for layers in (3, 4, 6, 7)}
    words = {
        layers: next(note for note in notes_of(flow.facts) if note.startswith("Flow")) for layers, flow in flows.items()
    }
    assert words[3] == "Flow through layers 10 – 12, rollout through layers 7 – 9 below."
    assert words[6] == "Flow through layers 7 – 12, nothing below."
    assert words[7] == "Flow through layers 6 – 12, nothing below."
    alone = twelve.explain(photo(64, 64), method="flow", layers=6, below="none")
    np.testing.assert_array_equal(flows[6].grid, alone.grid)
    assert flows[4].facts["below"] == [7, 8]


@pytest.mark.parametrize("method", ["gae", "gradient_rollout", "legrad"])
def test_methods_without_halves_refuse_the_word_by_name(twelve, method):
    with pytest.raises(OptionError, match=f"start_layer='middle' is an option of rollout: pass {method} the number"):
        twelve.explain(photo(64, 64), method=method, start_layer="middle")


def test_other_layers_are_refused(twelve):
    for method, start, message in (("rollout", "centre", "Unknown start layer 'centre'"), ("gae", 13, "from 1 to 12")):
        with pytest.raises(OptionError, match=message):
            twelve.explain(photo(64, 64), method=method, target=1, start_layer=start)


@pytest.fixture
def intercepted(monkeypatch) -> list[str]:
    """Names of the layers whose attention is intercepted."""
    names: list[str] = []
    take = Listening.on_attention_parts

    def counted(self, *args):
        names.append(self.path[-1][0])
        return take(self, *args)

    monkeypatch.setattr(Listening, "on_attention_parts", counted)
    return names


def test_layers_below_the_start_are_not_intercepted_if_rollout_alone_is_requested(intercepted):
    model, upper = explainer(), [f"blocks.{number}.attn" for number in range(6, 12)]

    def seen(**options) -> list[str]:
        intercepted.clear()
        model.explain_batch([photo(64, 64)], **options)
        return list(intercepted)

    first = grid(model)
    assert len(set(seen(method="rollout"))) == 6 and seen(method="rollout") == upper
    np.testing.assert_allclose(grid(model), first, rtol=1e-5)
    for options in (
        {"method": "rollout", "start_layer": 7},
        {"method": "rollout", "patch": (1, 1)},
        {"methods": ["rollout", "attention"]},
        {"methods": ["flow"]},
    ):
        assert len(seen(**options)) == 12
    intercepted.clear()
    assert len(model.record(photo(64, 64)).attentions) == 12
    with torch.no_grad():
        model.model.blocks[0].attn.qkv.weight.mul_(1.5)  # another model: all layers are seen again
    assert len(seen(method="rollout")) == 12 and len(seen(method="rollout")) == 6
    twice = [saliency.grid for saliency in model.explain_batch([photo(64, 64, 1), photo(64, 64)], method="rollout")]
    np.testing.assert_allclose(twice[1], grid(model, start_layer=7), rtol=1e-5)


def test_layers_of_a_shared_module_are_all_recorded(intercepted):
    model = explainer()
    for number in range(6, 12):
        model.model.blocks[number] = model.model.blocks[number - 6]
    expected = grid(model, start_layer=7)
    for _ in range(3):
        intercepted.clear()
        np.testing.assert_allclose(grid(model), expected, rtol=1e-5)
        assert len(intercepted) == 12


def test_texts_refuse_the_word_by_name():
    with pytest.raises(OptionError, match="start_layer='middle'"):
        text_method("gae", {"start_layer": "middle"})
