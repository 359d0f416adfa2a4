"""Loading models: what each name means, checkpoints of every kind, and what cannot be loaded."""

import argparse
import copy
import json
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.utils import ModelEma, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import ViTConfig, ViTModel

import vitflow
from tests.small import Custom
from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowWarning
from vitflow.models import hub
from vitflow.models.checkpoints import read_checkpoint
from vitflow.models.classes import imagenet_classes, imagenet_names, read_class_names
from vitflow.models.info import read_input_spec
from vitflow.models.names import class_names_of, model_id

ID = "test_vit"
PRETRAINED = {"input_size": [3, 160, 160], "fixed_input_size": True, "mean": [0.1] * 3, "std": [0.2] * 3}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return timm.create_model(ID, num_classes=1000).eval()


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model_ema", "model.module."])
def test_torch_checkpoints_of_every_kind(model, tmp_path, wrap):
    weights = model.state_dict()
    if wrap.endswith("."):
        saved = {wrap + name: value for name, value in weights.items()}
    elif wrap == "plain":
        saved = weights
    elif wrap == "model_ema":
        saved = {"model": {k: torch.zeros_like(v) for k, v in weights.items()}, "model_ema": weights, "epoch": 3}
    else:
        saved = {wrap: weights, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(saved, tmp_path / "weights.pth")
    loaded = vitflow.load_model(ID, checkpoint=tmp_path / "weights.pth")
    assert same_weights(loaded, model)
    assert not loaded.training


def below(prefix: str, weights: dict) -> dict:
    return {f"{prefix}.{name}": value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("save", "left_out"),
    [
        (lambda ours, zeros: {"state_dict": below("net", ours) | {"loss.w": torch.ones(3)}}, "loss.w"),
        (lambda ours, zeros: below("encoder.vit", ours) | {"a": torch.ones(1)}, "encoder.vit.*; a"),
        (lambda ours, zeros: {"a": {"b": {"c": below("d", ours)}, "opt": {"m": torch.ones(9)}}}, None),
        (lambda ours, zeros: {"student": zeros, "teacher": below("backbone", ours)}, None),
        (lambda ours, zeros: below("model", zeros) | below("ema_model", ours), "and [0-9]+ more"),
        (lambda ours, zeros: below("module.0", ours) | {"n_averaged": torch.tensor(3)}, None),
    ],
)
def test_any_prefix_is_removed_and_what_is_left_out_is_mentioned(model, tmp_path, save, left_out):
    ours = model.state_dict()
    torch.save(save(ours, {k: torch.zeros_like(v) for k, v in ours.items()}), tmp_path / "w.ckpt")
    with nullcontext() if left_out is None else pytest.warns(VitflowWarning, match=left_out):
        assert same_weights(vitflow.load_model(ID, checkpoint=tmp_path / "w.ckpt"), model)


def test_a_checkpoint_of_other_patches_is_refused_with_the_model_that_it_may_be_of(tmp_path):
    torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=3).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ModelError, match="patches of 16 × 16 pixels, not 32 × 32; it may be vit_tiny_patch16_224"):
        vitflow.load_model("vit_small_patch32_224", checkpoint=tmp_path / "w.pth")
    with pytest.raises(ModelError, match="does not name its architecture.*--model vit_tiny_patch16_224 --checkpoint"):
        vitflow.load_model(tmp_path / "w.pth")
    resampled = vitflow.load_model("vit_tiny_patch16_224", checkpoint=tmp_path / "w.pth", patch_size=32, num_classes=3)
    assert resampled.patch_embed.patch_size == (32, 32)


@pytest.mark.parametrize("fc_norm", [True, False])
def test_the_pooling_of_a_checkpoint_is_read_from_its_norm_or_given(tmp_path, fc_norm):
    trained = timm.create_model(ID, global_pool="avg", fc_norm=fc_norm)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    options = {} if fc_norm else {"global_pool": "avg"}
    with pytest.warns(VitflowWarning, match="global_pool='avg'" if fc_norm else "fc_norm=False"):
        loaded = vitflow.load_model(ID, checkpoint=tmp_path / "w.pth", **options)
    pixels = torch.rand(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(pixels), trained.eval()(pixels))


def test_a_safetensors_checkpoint_of_other_classes(tmp_path):
    fine_tuned = timm.create_model(ID, num_classes=3)
    save_file(fine_tuned.state_dict(), tmp_path / "w.safetensors")
    with pytest.warns(VitflowWarning, match="w.safetensors: built test_vit with num_classes=3, as"):
        loaded = vitflow.load_model(ID, checkpoint=tmp_path / "w.safetensors", class_names=["cat", "dog", "cow"])
    assert loaded.num_classes == 3
    assert same_weights(loaded, fine_tuned)
    assert class_names_of(loaded) == ["cat", "dog", "cow"]


def test_a_wrong_checkpoint_is_reported_in_one_line_with_the_model_that_it_may_be_of(tmp_path, recwarn):
    tiny = timm.create_model("vit_tiny_patch16_224", num_classes=7).half()
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ModelError) as caught:
        vitflow.load_model("vit_small_patch16_384", checkpoint=tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "152 of 152 tensors differ, cls_token is (1, 1, 192), not (1, 1, 384)" in message
    assert message.endswith("it may be vit_tiny_patch16_224.")
    assert "\n" not in message and len(message) < 400
    assert not recwarn.list  # no word on image sizes or classes of weights that do not fit


# Older releases of safetensors write no complex numbers.
COMPLEX = [torch.complex64] if torch.complex64 in safetensors.torch._SIZE else []


@pytest.mark.parametrize("kind", [torch.int8, torch.bool, *COMPLEX])
def test_weights_that_are_no_floats_are_refused_from_every_kind_of_file(model, tmp_path, kind):
    weights = model.state_dict()
    weights["head.weight"] = weights["head.weight"].to(kind)
    torch.save(weights, tmp_path / "w.pth")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": ID, "pretrained_cfg": PRETRAINED}))
    for name, checkpoint in ((ID, "w.pth"), (ID, "model.safetensors"), (tmp_path, None)):
        with pytest.raises(ModelError, match="Expected floating-point weights .* for head.weight"):
            vitflow.load_model(name, checkpoint=checkpoint and tmp_path / checkpoint)


def test_whole_numbers_stay_where_a_model_has_them(tmp_path):
    entry = timm.create_model("resnet10t", num_classes=3).eval()
    counter = next(name for name in entry.state_dict() if name.endswith("num_batches_tracked"))
    entry.state_dict()[counter].fill_(7)
    save_file(entry.state_dict(), tmp_path / "w.safetensors")
    assert same_weights(vitflow.load_model("resnet10t", checkpoint=tmp_path / "w.safetensors", num_classes=3), entry)


def test_an_image_is_no_weights_file_and_could_run_no_code(tmp_path):
    (tmp_path / "w.pth").write_bytes(b"\x89PNG\r\n\x1a\n" + b"image" * 20)
    with pytest.raises(ModelError, match="w.pth is not a torch checkpoint") as caught:
        read_checkpoint(tmp_path / "w.pth")
    assert "could run code" not in str(caught.value)
    (tmp_path / "w.pth").write_bytes(b"\x80\x02garbage")
    with pytest.raises(ModelError, match="damaged"):
        read_checkpoint(tmp_path / "w.pth")
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match="state dict.*whose keys are epoch"):
        read_checkpoint(tmp_path / "w.pth")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"0": "cat", "2": "dog"}', '{"a": 0, "b": 0}', "[[1]]", "null"])
def test_hostile_class_names_are_refused(tmp_path, text):
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(ModelError, match=r"Expected a JSON list of names, .*names\.json"):
        read_class_names(tmp_path / "names.json")


def test_a_file_that_could_run_code_is_refused(tmp_path):
    class Danger:
        def __reduce__(self):
            return (print, ("this must not run",))

    (tmp_path / "w.pth").write_bytes(pickle.dumps({"model": Danger()}))
    torch.save({"model": Danger()}, tmp_path / "zip.pth")
    for name in ("w.pth", "zip.pth"):
        with pytest.raises(ModelError, match="could run code|not a torch checkpoint"):
            read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_damaged_files_are_named(model, tmp_path, save):
    path = tmp_path / ("w.safetensors" if save is save_file else "w.pth")
    save(model.state_dict(), path)
    whole = path.read_bytes()
    for content in (b"", b"\x00" * 100, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=path.name):
            read_checkpoint(path)


def test_a_local_folder_as_timm_saves_it(model, tmp_path):
    config = {"architecture": ID, "num_classes": 1000, "pretrained_cfg": PRETRAINED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for name in (tmp_path, f"local-dir:{tmp_path}", tmp_path / "model.safetensors"):
        loaded = vitflow.load_model(name)
        assert same_weights(loaded, model)
    assert read_input_spec(vitflow.load_model(tmp_path)).mean == (0.1, 0.1, 0.1)


WRONG = {
    "no JSON": ("{", "cannot be loaded .JSONDecodeError"),
    "too deep": ("[" * 100_000, "cannot be loaded .RecursionError"),
    "of transformers": ({"model_type": "vit"}, "The weights of .* do not fit ViT"),
    "on the hub": ({"architecture": "hf-hub:somebody/a-model"}, "Expected a folder with"),
    "pretrained_cfg": ({"architecture": ID, "pretrained_cfg": 5}, "Expected a folder with"),
    "mean": ({"mean": ["a", "b", "c"]}, "Expected mean of .* to be a list of numbers"),
    "crop": ({"crop_pct": "x"}, "Expected crop_pct of .* to be a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_configuration_is_reported_in_one_line(model, tmp_path, case):
    held, message = WRONG[case]
    if isinstance(held, dict) and held.keys() <= PRETRAINED.keys() | {"crop_pct"}:
        held = {"architecture": ID, "num_classes": 1000, "pretrained_cfg": PRETRAINED | held}
    text = held if isinstance(held, str) else json.dumps(held)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message) as reported:
        vitflow.Explainer(tmp_path)
    assert "\n" not in str(reported.value)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.augreg_in21k_ft_in1k", "hf-hub:somebody/a-model"])
def test_an_unreachable_hub_gives_one_line_with_the_remedies(name, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        vitflow.load_model(name)
    message = str(caught.value)
    assert "\n" not in message
    for remedy in ("--checkpoint", "local-dir:", "demo"):
        assert remedy in message


def test_unknown_names_are_reported_with_what_was_meant():
    with pytest.raises(ModelError, match="Did you mean vit_base_patch16_224"):
        vitflow.load_model("vit_base_patch16_242")
    for name, listed in (
        ("dinov2", "vit_base_patch14_dinov2"),
        ("swin_tiny", "swin_tiny_patch4_window7_224"),
        ("DeiT3-small", "deit3_small_patch16_224"),
        ("patch14_reg4_dinov2.lvd", "vit_giant_patch14_reg4_dinov2"),
    ):
        with pytest.raises(ModelError, match=f"Names that contain it: .*{listed}"):
            vitflow.load_model(name)
    with pytest.raises(ModelError, match="Unknown model"):
        vitflow.load_model("\udcff" * 300)
    for missing in ("mine.pt", "./mine", "runs/mine.safetensors"):
        with pytest.raises(ModelError, match=f"'{missing}', but there is no such file"):
            vitflow.load_model(missing)
    with pytest.raises(ModelError, match="cannot be built with these options"):
        vitflow.load_model(ID, checkpoint=None, no_such_option=1)


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("demo", {"checkpoint": "x.pth"}, "omit checkpoint"),
        ("demo-text", {"drop_path_rate": 0.1}, "omit drop_path_rate"),
        (ID, {"fit": "pad"}, r"Explainer\(model, fit="),
    ],
)
def test_options_that_a_name_does_not_support_are_refused(name, options, remedy):
    with pytest.raises(OptionError, match=remedy):
        vitflow.load_model(name, **options)


def test_an_explainer_loads_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    trained = timm.create_model("test_vit", num_classes=3).eval()
    torch.save(trained.state_dict(), tmp_path / "mine.pth")
    image = vitflow.demo.sample_images()[0]
    expected = vitflow.explain(image, model=trained, method="gae", target=1)
    with pytest.warns(VitflowWarning, match="num_classes=3"):
        explainer = vitflow.Explainer("test_vit", checkpoint=tmp_path / "mine.pth")
    for saliency in (
        explainer.explain(image, method="gae", target=1),
        vitflow.explain(image, model=explainer, method="gae", target=1),
        vitflow.Explainer("test_vit", checkpoint=tmp_path / "mine.pth", num_classes=3).explain(image, target=1),
    ):
        np.testing.assert_array_equal(saliency.grid, expected.grid)
    with pytest.raises(OptionError, match="require a model id"):
        vitflow.Explainer(trained, checkpoint=tmp_path / "mine.pth")
    with pytest.raises(OptionError, match="data_config= differs"):
        vitflow.explain(image, model=explainer, data_config={"mean": (0.5,) * 3})
    for settings in ({"fit": "pad"}, {"device": "meta"}):
        with pytest.raises(OptionError, match=f"{min(settings)}= differs"):
            vitflow.explain(image, model=explainer, **settings)
        with pytest.raises(OptionError, match=rf"Explainer\(model, {min(settings)}="):
            vitflow.compare(image, model=explainer, **settings)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("a.txt", "cat\n\n  dog \n", ["cat", "dog"]),
        ("a.json", '["cat", "dog"]', ["cat", "dog"]),
        ("a.json", json.dumps({str(n): f"no {n}" for n in (1, 10, *range(2, 10), 0)}), [f"no {n}" for n in range(11)]),
        ("a.json", '{"dog": 1, "2": 2, "cat": 0}', ["cat", "dog", "2"]),  # as class_to_idx of ImageFolder
        ("a.json", '{"0": 1, "1": 2, "2": 0}', ["2", "0", "1"]),
        ("a.json", '{"0": "1", "1": "2", "2": "0"}', ["1", "2", "0"]),  # as id2label of transformers
        ("a.json", '{"3": 0, "5": 1}', ["3", "5"]),
    ],
)
def test_class_names_from_files(tmp_path, file, text, expected):
    (tmp_path / file).write_text(text)
    assert read_class_names(tmp_path / file) == expected


def test_the_input_spec_is_what_the_model_was_trained_on():
    spec = read_input_spec(timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k"))
    assert (spec.size, spec.mean, spec.crop_pct, spec.interpolation) == ((224, 224), (0.5,) * 3, 0.9, "bicubic")
    assert read_input_spec(timm.create_model(ID, img_size=(96, 128))).size == (96, 128)
    grey = read_input_spec(timm.create_model(ID, in_chans=1))
    assert (grey.channels, len(grey.mean)) == (1, 3)


@pytest.mark.parametrize("wrap", [AveragedModel, ModelEmaV3, nn.DataParallel])
def test_wrappers_keep_the_names_of_a_model_and_its_classes(model, wrap):
    explainer = vitflow.Explainer(wrap(model))
    assert (explainer.model_id, explainer.class_names[281]) == (ID, "tabby")
    with pytest.raises(UnsupportedModelError, match=r"Pass its \.ema"):
        vitflow.Explainer(ModelEma(model))
    for given, remedy in ((model.state_dict(), "Load a state dict"), (type(model), r"instance: VisionTransformer\(")):
        with pytest.raises(UnsupportedModelError, match=remedy):
            vitflow.Explainer(given)


@pytest.mark.parametrize(("head", "count"), [(None, 0), (nn.LayerNorm(64), 0), (nn.Sequential(nn.Linear(64, 64)), 64)])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_module_around_an_encoder_without_head_has_no_classes(head, count, library):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    hugging_face = ViTModel(ViTConfig(**sizes, image_size=160))
    encoder = timm.create_model(ID, num_classes=0) if library == "timm" else hugging_face
    config = {"input_size": (3, 160, 160), "mean": (0.5,) * 3, "std": (0.5,) * 3}

    def compute(self, pixels):
        output = self.encoder(pixels)
        return self.head(getattr(output, "pooler_output", output))

    model = Custom(compute, encoder=encoder, head=head or nn.Identity()).eval()
    explainer = vitflow.Explainer(model, data_config=config)
    assert explainer.num_classes == count
    saliency = explainer.explain(vitflow.demo.sample_images()[0], method="rollout")
    assert (saliency.target is None) is (count == 0)


def test_weights_that_are_not_known_are_called_by_their_architecture(model, tmp_path):
    assert model_id(timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1)) == "vit_tiny_patch16_224"
    assert model_id(nn.Linear(1, 1)) == "Linear"
    folder = tmp_path / "saved.by.timm"  # with the tag that its weights once came from
    folder.mkdir()
    config = {"architecture": ID, "num_classes": 1000, "pretrained_cfg": PRETRAINED | {"tag": "r160_in1k"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors")
    assert model_id(vitflow.load_model(folder)) == ID
    assert model_id(vitflow.load_model(ID, checkpoint=folder / "model.safetensors")) == ID
    assert model_id(vitflow.load_model("demo")) == "vitflow_demo"


def test_weights_are_called_by_what_they_were_loaded_as_until_they_change(model, tmp_path, monkeypatch):
    name = f"{ID}.r160_in1k"
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    reported = vitflow.load_model(name, checkpoint=tmp_path / "w.safetensors")
    build = timm.create_model
    monkeypatch.setattr(hub.timm, "create_model", lambda name, pretrained, **options: build(name, **options))
    downloaded = vitflow.load_model(ID)
    for loaded in (reported, downloaded, copy.deepcopy(downloaded), pickle.loads(pickle.dumps(reported))):
        assert model_id(loaded) == name
    assert vitflow.Explainer(downloaded, dtype="bfloat16").model_id == name
    assert model_id(vitflow.load_model(ID, num_classes=3)) == ID  # its head is new
    reported.load_state_dict(vitflow.load_model(ID).state_dict())
    with torch.no_grad():
        downloaded.head.bias.add_(1.0)
    assert [model_id(changed) for changed in (reported, downloaded)] == [ID, ID]
    with pytest.warns(VitflowWarning, match="num_classes=3"):
        save_file(build(ID, num_classes=3).state_dict(), tmp_path / "three.safetensors")
        assert model_id(vitflow.load_model(name, checkpoint=tmp_path / "three.safetensors")) == ID


def test_initial_values_that_weights_replace_are_not_drawn():
    before = torch.get_rng_state()
    with hub.SkippedInitialisers():
        built = torch.nn.Linear(8, 8)
    assert torch.get_rng_state().equal(before) and built.weight.requires_grad


@pytest.mark.parametrize("count", [1000, 11221, 11821, 21841, 21842, 21843])
def test_the_classes_of_imagenet_are_those_of_timm(count):
    info = ImageNetInfo(infer_imagenet_subset({"num_classes": count}))
    expected = [(id, *info.label_name_to_description(id).split(", ")) for id in info.label_names()]
    assert list(imagenet_classes(count)) == expected and len(set(imagenet_names(count))) > 0.97 * count  # homonyms
