"""Checkpoints of models that differ from timm's by parts, files or libraries; and the folders of training runs."""

import json
import warnings

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification

import vitflow
from tests.small import jitter
from vitflow.errors import ModelError, VitflowWarning

ID = "test_vit"
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}


def trained(name: str = ID, **options) -> nn.Module:
    torch.manual_seed(2)
    return timm.create_model(name, **{"num_classes": 4, **options}).eval()


PARTS = [
    {"in_chans": 12, "reg_tokens": 2},
    {"in_chans": 1, "init_values": 0.1, "num_classes": 0},
    {"reg_tokens": 3, "no_embed_class": True},
    {"qk_norm": True, "qkv_bias": False, "depth": 2},
    {"class_token": False, "global_pool": "map"},
    {"class_token": False, "global_pool": "avg"},
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts))
def test_parts_are_inferred_from_the_tensors_of_a_file(parts, tmp_path):
    original = trained(**parts, img_size=96)
    torch.save(original.state_dict(), tmp_path / "w.pth")
    with pytest.warns(VitflowWarning, match="w.pth: built test_vit with .*img_size=96") as caught:
        loaded = vitflow.load_model(ID, checkpoint=tmp_path / "w.pth")
    assert len(caught) == 1
    pixels = torch.randn(2, parts.get("in_chans", 3), 96, 96)
    assert torch.equal(loaded(pixels), original(pixels))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_small_patch14_dinov2", {"init_values": 0.0, "img_size": 56, "depth": 1}),
        ("deit_tiny_distilled_patch16_224", {"in_chans": 4, "depth": 1}),
        ("swin_tiny_patch4_window7_224", {"in_chans": 1}),
    ],
)
def test_parts_of_other_families(name, options, tmp_path):
    original = trained(name, **options)
    save_file(original.state_dict(), tmp_path / "w.safetensors")
    with pytest.warns(VitflowWarning, match="num_classes=4"):
        loaded = vitflow.load_model(name, checkpoint=tmp_path / "w.safetensors")
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_a_head_inside_a_sequential_is_loaded_if_it_is_one_layer(tmp_path):
    original = trained()
    original.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 4))
    torch.save(original.state_dict(), tmp_path / "w.pth")
    with (
        pytest.warns(VitflowWarning, match=r"head\.1 is loaded as head"),
        pytest.warns(VitflowWarning, match="classes=4"),
    ):
        loaded = vitflow.load_model(ID, checkpoint=tmp_path / "w.pth")
    pixels = torch.randn(1, 3, 160, 160)
    assert torch.equal(loaded(pixels), original.eval()(pixels))
    for layers in ([nn.LayerNorm(64), nn.Linear(64, 4)], [nn.Linear(64, 9), nn.GELU(), nn.Linear(9, 4)]):
        original.head = nn.Sequential(*layers)
        torch.save(original.state_dict(), tmp_path / "w.pth")
        with pytest.raises(ModelError, match=r"not one linear layer .*model\.head = "):
            vitflow.load_model(ID, checkpoint=tmp_path / "w.pth")


def test_positions_of_an_oblong_image_need_its_size(tmp_path):
    original = trained(img_size=(64, 96))
    torch.save(original.state_dict(), tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"24 patches are no square.*img_size=.*64, 96"):
        vitflow.load_model(ID, checkpoint=tmp_path / "w.pth")
    with pytest.warns(VitflowWarning, match="num_classes=4"):
        loaded = vitflow.load_model(ID, checkpoint=tmp_path / "w.pth", img_size=(64, 96))
    assert vitflow.Explainer(loaded).spec.size == (64, 96)


def sharded(weights: dict, folder, suffix: str) -> None:
    """Save weights in two files with an index, as transformers does."""
    folder.mkdir()
    names, stem = list(weights), {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    placed = {name: f"{stem}-{1 + (number > 9):05}-of-00002.{suffix}" for number, name in enumerate(names)}
    for file in set(placed.values()):
        part = {name: weights[name] for name in names if placed[name] == file}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.filterwarnings("ignore::vitflow.VitflowWarning")
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_in_several_files(suffix, tmp_path):
    original, folder = trained(), tmp_path / "run"
    sharded(original.state_dict(), folder, suffix)
    [index] = folder.glob("*.json")
    for path in (folder, index):
        loaded = vitflow.load_model(ID, checkpoint=path)
        assert all(torch.equal(value, original.state_dict()[key]) for key, value in loaded.state_dict().items())
    config = {"architecture": ID, "num_classes": 4, "pretrained_cfg": {"input_size": [3, 160, 160]}}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(vitflow.load_model(folder).pos_embed, original.pos_embed)
    part = next(folder.glob("*-00001-*"))
    with pytest.raises(ModelError, match=r"a part of the weights only: pass the index\.json"):
        vitflow.load_model(ID, checkpoint=part)
    part.rename(tmp_path / part.name)
    with pytest.raises(ModelError, match="which is not next to it"):
        vitflow.load_model(ID, checkpoint=folder)
    for hostile in ("[]", "{", '{"weight_map": 3}', json.dumps({"weight_map": {"a": f"../{part.name}"}})):
        index.write_text(hostile)
        with pytest.raises(ModelError, match=r"index of files|not next to it"):
            vitflow.load_model(ID, checkpoint=index)


@pytest.mark.filterwarnings("ignore::vitflow.VitflowWarning")
def test_the_folder_of_a_training_run(tmp_path):
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        torch.save({}, tmp_path / name)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ModelError, match=r"got 0: .*checkpoint-5/"):
        vitflow.load_model(ID, checkpoint=tmp_path)
    torch.save(trained().state_dict(), tmp_path / "epoch=3.ckpt")
    assert vitflow.load_model(ID, checkpoint=tmp_path).num_classes == 4
    torch.save(trained().state_dict(), tmp_path / "last.ckpt")
    with pytest.raises(ModelError, match=r"got 2: .*epoch=3\.ckpt, last\.ckpt"):
        vitflow.load_model(ID, checkpoint=tmp_path)
    for name, remedy in (
        ("adapter_config.json", "merge_and_unload"),
        ("zero_to_fp32.py", "zero_to_fp32"),
        ("__0_0.distcp", "dcp_to_torch"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=remedy):
            vitflow.load_model(ID, checkpoint=tmp_path)
    adapted = {f"base.{key}": value for key, value in trained().state_dict().items()}
    torch.save(adapted | {"base.blocks.0.attn.qkv.lora_A.default.weight": torch.ones(1, 1)}, tmp_path / "lora.pth")
    with pytest.raises(ModelError, match="merge_and_unload"):
        vitflow.load_model(ID, checkpoint=tmp_path / "lora.pth")


def test_a_state_dict_for_a_folder_of_transformers(tmp_path):
    folder, image = tmp_path / "vit", vitflow.demo.sample_images()[0]
    ViTForImageClassification(ViTConfig(**SIZES, num_labels=5)).save_pretrained(folder)
    original = jitter(ViTForImageClassification(ViTConfig(**SIZES, num_labels=3)).eval(), 0.1)
    torch.save(
        {"state_dict": {f"net.{key}": value for key, value in original.state_dict().items()}}, tmp_path / "mine.ckpt"
    )
    with pytest.warns(VitflowWarning, match="num_labels=3"):
        loaded = vitflow.load_model(folder, checkpoint=tmp_path / "mine.ckpt")
    pixels = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded(pixels).logits, original(pixels).logits)
    with pytest.warns(
        VitflowWarning, match=r"no preprocessor_config.json: .* mean \(0\.5, .*pass data_config"
    ) as caught:
        explainer = vitflow.Explainer(loaded)
        explainer.explain(image, method="rollout")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vitflow.Explainer(loaded, data_config={"mean": (0.4,) * 3, "std": (0.2,) * 3})
    torch.save(trained().state_dict(), tmp_path / "timm.pth")
    with pytest.raises(ModelError, match="tensors differ, are missing or unknown"):
        vitflow.load_model(folder, checkpoint=tmp_path / "timm.pth")
    with pytest.raises(ModelError, match="its names are those of transformers"):
        vitflow.load_model(ID, checkpoint=folder)


def test_the_default_processor_keeps_the_size_of_the_model(tmp_path):
    sizes = {**SIZES, "image_size": 42}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.warns(VitflowWarning, match="BitImageProcessor"):
        spec = vitflow.Explainer(tmp_path).spec
    assert spec.size == (42, 42)
    np.testing.assert_allclose(spec.mean, (0.4815, 0.4578, 0.4082), atol=1e-4)
