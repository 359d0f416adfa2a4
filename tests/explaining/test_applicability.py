"""Support of methods by timm models: determined without values, and compared with runs with values."""

import pytest
import timm
import torch
from torch import nn

from vitflow import record_attention
from vitflow.analysis import applicability as support
from vitflow.analysis.applicability import Support, list_models, matching, support_of
from vitflow.errors import ModelError, UnsupportedModelError

CLASS_TOKEN, MEAN, UNPOOLED = (
    "class token",
    "average over patches",
    "average over patches (the model does not pool)",
)

# One model of each kind: rollout, flow, prefix tokens, grid, pooling.
KINDS = {
    "test_vit": ("yes", "yes", 1, (10, 10), CLASS_TOKEN),
    "test_vit3": ("yes", "yes", 1, (10, 10), "attention pooling"),
    "deit_tiny_distilled_patch16_224": ("yes", "yes", 2, (14, 14), "class and distillation token"),
    "vit_small_patch14_reg4_dinov2": ("yes", "yes", 5, (37, 37), CLASS_TOKEN),
    "eva02_tiny_patch14_224": ("yes", "yes", 1, (16, 16), MEAN),
    "tnt_s_legacy_patch16_224": ("yes", "yes", 1, (14, 14), CLASS_TOKEN),
    "cait_xxs24_224": ("windows", "no", 0, (14, 14), CLASS_TOKEN),
    "pit_ti_distilled_224": ("windows", "no", 2, (27, 27), "class and distillation token"),
    "test_maxvit": ("windows", "no", 0, (40, 40), MEAN),
    "maxvit_nano_rw_256": ("windows", "no", 0, (64, 64), MEAN),
    "swin_tiny_patch4_window7_224": ("windows", "no", 0, (56, 56), MEAN),
    "swinv2_tiny_window8_256": ("windows", "no", 0, (64, 64), MEAN),
    "hiera_tiny_224": ("windows", "no", 0, (56, 56), UNPOOLED),
    "samvit_base_patch16": ("windows", "no", 0, (64, 64), MEAN),
    "halonet26t": ("windows", "no", 0, (16, 16), MEAN),
    "volo_d1_224": ("windows", "no", 0, (28, 28), CLASS_TOKEN),
    "pvt_v2_b0": ("windows", "no", 0, (56, 56), MEAN),
    "levit_128s": ("windows", "no", 0, (14, 14), MEAN),
}
KINDS = {name: actual for name, actual in KINDS.items() if timm.is_model(name)}  # older releases of timm have fewer
# Models to which rollout does not apply, and why.
NONE = {
    "resnet18": "no attention between tokens",
    "xcit_nano_12_p16_224": "attention over channels (cross-covariance)",
    "efficientvit_b0": "linear attention without a matrix between tokens",
    "crossvit_tiny_240": "two branches of tokens at two scales, which exchange only their class tokens",
    "vit_dwee_patch16_reg1_gap_256": "the difference of two attention matrices, which has negative entries",
    "efficientvit_m0": "its windows cannot be mapped to the image",
}
NONE = {name: reason for name, reason in NONE.items() if timm.is_model(name)}


def run_with_values(name: str) -> Support:
    torch.manual_seed(0)
    return support._support_in(timm.create_model(name).eval(), "cpu")


@pytest.mark.parametrize("name", KINDS)
def test_shapes_alone_report_what_applies(name):
    actual = support_of(name)
    assert (actual.rollout, actual.flow, actual.num_prefix_tokens, actual.grid, actual.pooling) == KINDS[name]
    assert actual.gradients == actual.rollout
    assert (actual.reason is None) == (actual.flow == "yes")


@pytest.mark.parametrize("name", NONE)
def test_where_rollout_does_not_apply_the_reason_is_reported(name):
    assert support_of(name) == Support("no", "no", "no", NONE[name])


@pytest.mark.parametrize("name", ["test_vit", "maxvit_rmlp_pico_rw_256", "resnet18", "crossvit_tiny_240"])
def test_a_run_with_values_says_the_same(name):
    assert run_with_values(name) == support_of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *NONE])
def test_runs_with_values_say_the_same_for_every_kind(name):
    if name == "samvit_base_patch16":
        pytest.skip("takes a minute with values")
    if name == "vit_dwee_patch16_reg1_gap_256":
        pytest.skip("the recorder refuses it while it runs, on shapes as well as on values")
    assert run_with_values(name) == support_of(name)


def test_heads_that_are_computed_one_after_another_are_refused_by_the_recorder():
    model = timm.create_model("efficientvit_m0").eval()
    with record_attention(model) as trace, torch.no_grad():
        model(torch.randn(1, *model.pretrained_cfg["input_size"]))
    with pytest.raises(UnsupportedModelError, match="The image positions of the tokens"):
        trace.layout  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "vit_relpos_small_patch16_224",
        "beit_base_patch16_224",
        "vit_tiny_r_s16_p8_224",
        "cait_xxs24_224",
        "twins_svt_small",
    ],
)
def test_two_blocks_report_as_much_as_all(name, monkeypatch):
    short = support_of(name)
    monkeypatch.setattr(support, "_UNIFORM", ())
    monkeypatch.setattr(support, "_STAGED", ())
    monkeypatch.setattr(support, "_cache", {})
    depths: list[dict[str, object]] = []
    genuine = support._draft
    monkeypatch.setattr(support, "_draft", lambda name, **options: depths.append(options) or genuine(name, **options))
    assert support_of(name) == short
    assert depths == [{}]


def test_a_model_that_cannot_be_built_short_is_built_whole(monkeypatch):
    monkeypatch.setattr(support, "_cache", {})
    monkeypatch.setattr(support, "_UNIFORM", ("levit",))  # whose constructor takes no depth
    assert support_of("levit_128s").grid == (14, 14)


def test_what_cannot_run_on_shapes_runs_on_values_where_it_is_small(monkeypatch):
    monkeypatch.setattr(support, "_cache", {})
    genuine = support._support_in

    def only_on_values(model: nn.Module, device: str) -> Support:
        if device == "meta":
            raise RuntimeError("Tensor.item() cannot be called on meta tensors")
        return genuine(model, device)

    monkeypatch.setattr(support, "_support_in", only_on_values)
    assert support_of("test_vit").rollout == "yes"
    monkeypatch.setattr(support, "_SMALL", 0)
    monkeypatch.setattr(support, "_cache", {})
    actual = support_of("test_vit")
    assert actual.rollout == actual.flow == actual.gradients == "unknown"
    assert actual.reason == "unknown without running it (RuntimeError)"


def test_an_architecture_is_looked_at_once_for_all_its_tags(monkeypatch):
    looked_at: list[str] = []
    monkeypatch.setattr(support, "_cache", {})
    genuine = support._find
    monkeypatch.setattr(support, "_find", lambda name: looked_at.append(name) or genuine(name))
    rows = list(list_models(matching("vit_tiny_patch16_*")))
    assert len(looked_at) == len({row["architecture"] for row in rows}) < len(rows)
    assert [row["model"] for row in rows] == timm.list_pretrained("vit_tiny_patch16_*")
    first = rows[0]
    assert first["architecture"] == "vit_tiny_patch16_224"
    assert (first["tag"], first["family"]) == ("augreg_in21k", "vision_transformer")
    assert (first["input_size"], first["num_classes"], first["grid"]) == ([3, 224, 224], 21843, [14, 14])


def test_tags_with_images_of_another_size_have_another_grid():
    rows = {row["model"]: row for row in list_models(matching("mobilenetv4_hybrid_medium"))}
    by_size = {tuple(row["input_size"][1:]): tuple(row["grid"]) for row in rows.values()}
    assert by_size[224, 224] == (14, 14)
    assert by_size[256, 256] == (16, 16)


def test_names_without_a_wildcard_stand_for_one_model():
    assert matching("test_vit.r160_in1k") == ["test_vit.r160_in1k"]
    assert matching("test_vit") == ["test_vit.r160_in1k"]
    untrained = next(name for name in timm.list_models("vit_*") if not timm.list_pretrained(name))
    assert matching(untrained) == [untrained]
    assert untrained not in matching("vit_*")
    assert untrained in matching("vit_*", untrained=True)
    (row,) = list_models([untrained])
    assert (row["model"], row["tag"], row["rollout"]) == (untrained, None, "yes")


def test_an_unknown_name_is_reported_with_what_was_meant():
    with pytest.raises(ModelError, match="Did you mean vit_base_patch16_224"):
        matching("vit_base_patch16_242")
