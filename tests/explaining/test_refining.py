"""Refinement as a step of every method: what is recorded for it, where it applies, and what is told of it."""

from functools import partial

import numpy as np
import pytest
import timm
import torch

from tests import references
from tests.small import Custom, jitter
from vitflow import Explainer, Trace, explain_folder, register_method
from vitflow.demo import sample_images
from vitflow.errors import OptionError, UnsupportedModelError, VitflowWarning
from vitflow.explaining.applying import affinity_of
from vitflow.explaining.sampling import FLOOR, geometric_mean
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.layers import AttentionLayer, RecordedLayers
from vitflow.recording.recorder import record_attention
from vitflow.registry import method_table

IMAGES = sample_images()[:2]
KINDS = ("attention", "keys", "both")
ALL = [method.name for method in method_table.list_methods()]


def small(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    sizes = {"depth": 2, **options} if name.startswith("vit") else options
    model = jitter(timm.create_model(name, num_classes=5, img_size=64, **sizes), 0.2, by_width=False)
    return Explainer(model, data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})


@pytest.mark.parametrize("attribute", ["mean", "fused"])
def test_the_affinity_has_the_patches_of_each_layer(attribute):
    """Prefix and suffix tokens may differ from layer to layer."""
    layouts = [TokenLayout(0, 2, 2), TokenLayout(1, 2, 2), TokenLayout(2, 2, 2, 1)]
    matrices = [torch.rand(1, layout.num_tokens, layout.num_tokens) for layout in layouts]
    layers = [
        AttentionLayer("attn", located=LayerTokens(layout, layout), **{attribute: matrix})
        for layout, matrix in zip(
            layouts, (each if attribute == "mean" else {("mean", False): each} for each in matrices), strict=True
        )
    ]
    actual = affinity_of(Trace(layers=RecordedLayers(layers)), "attention", (2, 2)).matrix[0]
    first = [layout.num_prefix_tokens for layout in layouts]
    among = [each[0, i : i + 4, i : i + 4].double().numpy() for each, i in zip(matrices, first, strict=True)]
    np.testing.assert_allclose(actual, references.co_attention(among), rtol=1e-5)


def of_transformers(attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"image_size": 64, "patch_size": 16, "num_labels": 5}
    config = transformers.ViTConfig(**sizes, attn_implementation=attention)
    model = jitter(transformers.ViTForImageClassification(config), 0.2, by_width=False)
    return Explainer(model, data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})


MAKERS = {"timm": small, "transformers": of_transformers, "unfused": partial(of_transformers, "eager")}


def literal(explainer, affinity):
    """The affinity of the first image's patches by the definition, from all heads and the projected keys."""
    attended, keys, hooks = [], [], []
    for name, module in explainer.model.named_modules():
        if name.endswith(".qkv"):  # timm's: queries, keys and values of all heads by one projection
            hooks.append(module.register_forward_hook(lambda m, a, out: keys.append(out[0].chunk(3, -1)[1])))
        elif name.endswith((".key", ".k_proj")):
            hooks.append(module.register_forward_hook(lambda m, a, out: keys.append(out[0])))
    pixels = explainer.pixels(IMAGES[0])
    with torch.no_grad():
        explainer.model(pixels)
        for hook in hooks:
            hook.remove()
        with record_attention(explainer.model) as trace:
            explainer.model(pixels)
    patches = trace.layout.num_patches
    attended = [heads[0].mean(dim=0)[-patches:, -patches:].double().numpy() for heads in trace.heads()]
    of_keys = references.key_affinity([layer[-patches:].double().numpy() for layer in keys])
    of_attention = references.co_attention(attended)
    return {"attention": of_attention, "keys": of_keys, "both": (of_attention + of_keys) / 2}[affinity]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("affinity", KINDS)
@pytest.mark.parametrize("method", ["rollout", "gae"])  # one keeps fused matrices, the other every head
def test_a_map_is_refined_by_the_definition(make, affinity, method):
    explainer = make()
    plain = explainer.explain(IMAGES[0], method=method, refine=0).grid
    refined = explainer.explain(IMAGES[0], method=method, refine=2, affinity=affinity)
    matrix = literal(explainer, affinity)
    expected = (matrix @ matrix @ plain.ravel().astype(np.float64)).reshape(plain.shape)
    np.testing.assert_allclose(refined.grid, expected, rtol=0, atol=1e-4 * plain.max())  # cosines in float32
    assert (refined.options["refine"], refined.options["affinity"]) == (2, affinity)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(method_table, "METHODS", dict(method_table.METHODS))


def test_a_method_of_the_user_is_refined_and_signs_are_kept(demo, table):
    def signed(trace, *, weight):
        grid = torch.zeros(len(trace.pixels), trace.layout.rows, trace.layout.cols)
        grid[:, 2, 3], grid[:, 8, 8] = weight, -weight
        return grid

    register_method("signed", signed, defaults={"weight": 3.0})
    plain, refined = (demo.explain(IMAGES[0], method="signed", refine=steps) for steps in (0, 1))
    assert plain.options == {"weight": 3.0, "refine": 0, "affinity": "attention"}
    assert np.count_nonzero(plain.grid) == 2 and refined.grid.min() < 0 < refined.grid.max()
    np.testing.assert_allclose(refined.grid.sum(), 0.0, atol=1e-6)
    constant = register_method("constant", lambda trace: torch.ones(len(trace.pixels), 12, 12)).name
    np.testing.assert_allclose(demo.explain(IMAGES[0], method=constant, refine=3).grid, 1.0, rtol=0, atol=1e-7)
    assert "refine" not in demo.explain(IMAGES[0], method="centre").options


def test_what_moves_along_attention_is_refined_once_by_default_and_raw_attention_is_not():
    """As the rules in benchmarks/defaults.py and separation.py found it for these; for no other was asked."""
    steps = {name: method_table.get_method(name).complete({}).get("refine", 0) for name in ALL}
    refined = {"rollout", "flow", "gradient_rollout", "gae", "frozen_gradient", "sampling", "consensus"}
    assert steps == {name: int(name in refined) for name in steps}


def test_where_it_does_not_apply_it_is_refused_if_requested_and_else_left_out_and_reported(table):
    explainer = small("swin_tiny_patch4_window7_224", window_size=4, depths=(2, 2, 2, 2))
    with pytest.raises(UnsupportedModelError, match="in no layer of SwinTransformer do all 16 × 16 .* refine=0"):
        explainer.explain(IMAGES[0], method="rollout", refine=1)
    rollout = method_table.get_method("rollout")
    register_method("eager", rollout.function, defaults={**rollout.defaults, "refine": 1}, needs=rollout.needs)
    actual = explainer.explain(IMAGES[0], method="eager")
    assert actual.options["refine"] == 0
    assert actual.facts["refinement"].startswith("left out: Refinement does not apply: in no layer of SwinTransformer")
    np.testing.assert_array_equal(actual.grid, explainer.explain(IMAGES[0], method="rollout", refine=0).grid)


def test_a_run_leaves_out_what_is_only_a_default_as_a_single_map_does(tmp_path):
    """Runs over folders and evaluations hand over each method with all its options."""
    explainer = small("swin_tiny_patch4_window7_224", window_size=4, depths=(1, 1, 1, 1))
    summary = explain_folder(IMAGES, tmp_path, model=explainer, methods=["rollout"])
    assert [row["status"] for row in summary] == ["explained"] * 2
    assert all("left out" in row["facts"]["rollout"]["refinement"] for row in summary)
    with pytest.raises(UnsupportedModelError, match="Refinement does not apply"):
        explain_folder(IMAGES, tmp_path / "asked", model=explainer, methods=["rollout"], refine=2)


def test_heads_that_are_mixed_are_left_out_and_their_keys_are_not():
    explainer = small("cait_xxs24_224", depth=2)  # its class token joins late, in attention of its own
    with pytest.raises(UnsupportedModelError, match="Cait mixes its heads .* affinity='keys'"):
        explainer.explain(IMAGES[0], method="rollout", refine=1, value_weighted=False)
    plain, refined = (
        explainer.explain(IMAGES[0], method="rollout", value_weighted=False, refine=steps, affinity="keys").grid
        for steps in (0, 1)
    )
    assert refined.shape == (4, 4)
    assert refined.sum() == pytest.approx(plain.sum(), rel=1e-6)


def test_patches_that_are_all_equal_are_reported(table):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=2).eval()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight[:384])  # queries and keys
    explainer = Explainer(model)
    with pytest.warns(VitflowWarning, match="treats all patches as nearly equal"):
        actual = explainer.explain(IMAGES[0], method="input_gradient", refine=1)
    assert actual.facts["refinement"] == "left out: the model treats all patches as nearly equal"
    np.testing.assert_allclose(actual.grid, explainer.explain(IMAGES[0], method="input_gradient").grid, rtol=1e-5)
    entry = {"method": "consensus", "affinity": "attention"}  # the keys are nothing at all
    consensus = explainer.explain(IMAGES[0], **entry)  # only a default there
    assert consensus.options["refine"] == 0
    assert consensus.facts["refinement"] == "left out: the model treats all patches as nearly equal"
    with pytest.warns(VitflowWarning, match="treats all patches as nearly equal"):
        requested = explainer.explain(IMAGES[0], refine=1, **entry)
    np.testing.assert_allclose(requested.grid, consensus.grid, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refine": 1_000_000}, "from 0 to 100, got 1000000"),
        ({"refine": 1.5}, "whole number"),
        ({"affinity": "key"}, "Unknown affin"),
        ({"method": "input_gradient", "patch_size": 16, "refine": 1}, "all 6 × 6 patches of the map"),
    ],
)
def test_steps_and_affinity_are_checked(demo, options, words):
    with pytest.raises((OptionError, UnsupportedModelError), match=words):
        demo.explain(IMAGES[0], **{"method": "rollout"} | options)


def test_consensus_is_the_weighted_geometric_mean_of_its_parts_refined(demo):
    expected = 1.0
    for part, weight in {"gae": 1, "sampling": 2}.items():
        entry = {"head_fusion": "signed_mean"} if part == "gae" else {}
        grid = demo.explain(IMAGES[0], method=part, refine=1, affinity="both", **entry).grid.astype(np.float64)
        expected = expected * np.maximum(grid / grid.sum(), FLOOR / grid.size) ** (weight / 3)
    actual = demo.explain(IMAGES[0], method="consensus")
    np.testing.assert_allclose(actual.grid, expected, rtol=2e-4, atol=1e-9)
    assert actual.class_specific and actual.options["refine"] == 1


def test_a_zero_in_one_map_leaves_the_order_of_the_others():
    zero, other = torch.tensor([[[0.0, 0.0, 1.0]]]), torch.tensor([[[0.2, 0.3, 0.5]]])
    actual = geometric_mean([zero, other, other], [1, 1, 1])[0, 0]
    assert actual[0] < actual[1] < actual[2]
    assert torch.isfinite(geometric_mean([torch.zeros(1, 1, 3), other], [1, 2])).all()


def test_an_image_with_an_empty_row_in_each_layer_is_not_refined_and_its_neighbours_are():
    """One patch of an image attends to the class token alone."""
    empty: list[int] = []  # images of a batch; none in the runs that check the model

    def attend(self, tokens, **_):
        query, key, value = self.qkv(tokens).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(len(tokens), 1, 17, 17)
        mask[empty, :, 5, 1:] = -torch.inf
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(attended.transpose(1, 2).flatten(2))

    explainer = small()
    for block in explainer.model.blocks:
        block.attn = Custom(attend, qkv=block.attn.qkv, proj=block.attn.proj)
    images = list(np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8))
    explainer.explain_batch(images, method="gae", target=1)
    empty[:] = [1]
    together = explainer.explain_batch(images, method="gae", target=1)
    for image, actual, steps, empty[:] in zip(images, together, (1, 0), ([], [0]), strict=True):
        expected = explainer.explain(image, method="gae", target=1)
        np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-4, atol=1e-6 * expected.grid.max())
        assert actual.options["refine"] == expected.options["refine"] == steps
    assert "attends to none" in together[1].facts["refinement"]
    with pytest.warns(VitflowWarning, match="some patch attends to none"):
        explainer.explain_batch(images, method="gae", target=1, refine=1)
