"""Video models: tubelets, maps against the model's own attention, and what is refused."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.explaining.test_clips import video
from tests.recording.test_recorder import state_of
from vitflow import Explainer, explain_clip
from vitflow.cli import cli
from vitflow.demo import sample_images
from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.models.videos import StackedFrames

transformers = pytest.importorskip("transformers")

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 5}
CLIP = {"image_size": 32, "patch_size": 8, "num_frames": 8}
CONFIG = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
KINDS = {"VideoMAE": {**SIZE, **CLIP, "tubelet_size": 2}, "Vivit": {**SIZE, **CLIP, "tubelet_size": [2, 8, 8]}}
FRAMES = np.random.default_rng(0).integers(0, 256, (8, 40, 48, 3), dtype=np.uint8)


def built(kind: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**KINDS[kind], **changes})
    model = getattr(transformers, f"{kind}ForVideoClassification")(config).eval()
    with torch.no_grad():  # attention far from uniform
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(12)
    return model


@pytest.fixture(params=list(KINDS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return built(request.param)


def test_stacking_is_undone_and_puts_tubelets_in_bands(model):
    stacked = StackedFrames(model)
    clip = torch.arange(2 * 8 * 3 * 32 * 32.0).reshape(2, 8, 3, 32, 32)
    tall = stacked.stack(clip)
    assert tall.shape == (2, 3, 8 * 32, 32) and stacked.layout.rows == 4 * 4 and stacked.layout.cols == 4
    assert torch.equal(stacked.unstack(tall), clip)
    bands = tall.unflatten(2, (16, 16))  # a band for each row of tubelets
    for time, row in ((0, 0), (1, 3), (3, 2)):
        first, second = clip[:, 2 * time : 2 * time + 2, :, 8 * row : 8 * row + 8].unbind(dim=1)
        assert torch.equal(bands[:, :, 4 * time + row], torch.cat([first, second], dim=2))


def test_rollout_is_that_of_the_attention_that_the_model_returns(model):
    explainer = Explainer(model, data_config=CONFIG)
    before = state_of(model)
    clip = explain_clip(FRAMES, model=explainer, method="rollout", target=2, preset="paper")
    assert state_of(model) == before
    single = Explainer(torch.nn.Conv2d(3, 2, 1), data_config={"input_size": (3, 32, 32), **CONFIG})  # prepares frames
    pixels = torch.stack([single.pixels(frame)[0] for frame in FRAMES])[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(pixels, output_attentions=True)
    prefix = 1 if "Vivit" in type(model).__name__ else 0
    product = torch.eye(64 + prefix, dtype=torch.float64)
    for layer in output.attentions:
        mean = layer[0].double().mean(dim=0)
        mixed = 0.5 * mean + 0.5 * torch.eye(len(mean))
        product = (mixed / mixed.sum(dim=-1, keepdim=True)) @ product
    row = product[0] if prefix else product.mean(dim=0)
    expected = row[prefix:].reshape(4, 4, 4)
    assert clip.grid.shape == (4, 4, 4) and clip.span == 2 and clip.joint
    np.testing.assert_allclose(np.stack([frame.grid for frame in clip.frames]), expected, rtol=1e-4)
    above = (expected - expected.min()).sum(dim=(1, 2))
    np.testing.assert_allclose(clip.shares, above / above.sum(), rtol=1e-3)
    np.testing.assert_allclose(clip.grid, expected / expected.sum(), rtol=1e-3)
    assert clip.score.value == pytest.approx(float(output.logits[0].softmax(dim=0)[2]), abs=1e-5)


@pytest.mark.parametrize("method", ["gae", "flow", "sampling"])
def test_methods_give_finite_maps_of_tubelets(model, method):
    clip = explain_clip(FRAMES, model=Explainer(model, data_config=CONFIG), method=method, target=1)
    assert clip.grid.shape == (4, 4, 4) and np.isfinite(clip.grid).all() and np.ptp(clip.grid) > 0
    assert clip.shares.sum() == pytest.approx(1.0) and len(clip.frames) == 4
    for index, frame in enumerate(clip.frames):
        np.testing.assert_array_equal(frame.image, FRAMES[2 * index])
        assert frame.overlay().shape == FRAMES.shape[1:]


def hidden_drop(model: torch.nn.Module, frames: slice) -> float:
    """Drop in the log-odds of class 1 when a tubelet in row 1 and column 3 is replaced by the mean."""
    single = Explainer(torch.nn.Conv2d(3, 2, 1), data_config={"input_size": (3, 32, 32), **CONFIG})
    pixels = torch.stack([single.pixels(frame)[0] for frame in FRAMES])[None]
    hidden = pixels.clone()
    hidden[0, frames, :, 8:16, 24:32] = pixels.mean(dim=(1, 3, 4))[0][:, None, None]
    with torch.no_grad():
        logits = model(torch.cat([pixels, hidden])).logits.double()
    odds = logits[:, 1] - torch.cat([logits[:, :1], logits[:, 2:]], dim=1).logsumexp(dim=1)
    return float(odds[0] - odds[1])


def test_hiding_a_tubelet_is_shown_in_its_place(model):
    clip = explain_clip(FRAMES, model=Explainer(model, data_config=CONFIG), method="occlusion", target=1)
    assert clip.frames[2].grid[1, 3] == pytest.approx(hidden_drop(model, slice(4, 6)), abs=1e-4)
    assert StackedFrames(model).shape.grid == (4, 4, 4)


def test_wrong_input_is_refused(model):
    explainer = Explainer(model, data_config=CONFIG)
    with pytest.raises(ShapeError, match="Expected 8 frames, as .*ForVideoClassification reads, got 5"):
        explain_clip(FRAMES[:5], model=explainer)
    with pytest.raises(OptionError, match="requires frames as images, got a tensor"):
        explain_clip(torch.zeros(8, 3, 32, 32), model=explainer)
    with pytest.raises(OptionError, match="reads clips of 8 frames, got an image: use vitflow.explain_clip"):
        explainer.explain(FRAMES[0])
    with pytest.raises(OptionError, match=r"Expected input_size=\(3, 32, 32\)"):
        Explainer(model, data_config={"input_size": (3, 64, 64), **CONFIG})


def test_divided_attention_takes_methods_without_attention():
    torch.manual_seed(0)
    timesformer = transformers.TimesformerForVideoClassification(transformers.TimesformerConfig(**SIZE, **CLIP)).eval()
    with torch.no_grad():
        for parameter in timesformer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    explainer = Explainer(timesformer, data_config=CONFIG)
    for method, options in (("occlusion", {}), ("sampling", {"masks": 16}), ("input_gradient", {})):
        clip = explain_clip(FRAMES, model=explainer, method=method, target=1, **options)
        assert clip.grid.shape == (8, 4, 4) and np.isfinite(clip.grid).all() and np.ptp(clip.grid) > 0
        if method == "occlusion":
            assert clip.frames[5].grid[1, 3] == pytest.approx(hidden_drop(timesformer, slice(5, 6)), abs=1e-4)
    for method in ("rollout", "gradcam"):
        with pytest.raises(UnsupportedModelError, match=f"separate layers.*{method} is not supported"):
            explain_clip(FRAMES, model=explainer, method=method, target=1)


def test_a_head_that_pools_by_cross_attention_takes_no_rollout():
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "crop_size": 32, "patch_size": 8}
    sizes |= {"frames_per_clip": 4, "num_pooler_layers": 1, "pred_hidden_size": 48, "pred_num_hidden_layers": 1}
    config = transformers.VJEPA2Config(**sizes, pred_num_attention_heads=2, tubelet_size=2, num_labels=5)
    explainer = Explainer(transformers.VJEPA2ForVideoClassification(config).eval(), data_config=CONFIG)
    clip = explain_clip(FRAMES[:4], model=explainer, method="occlusion", target=1)
    assert clip.grid.shape == (2, 4, 4) and np.ptp(clip.grid) > 0
    with pytest.raises(UnsupportedModelError, match="rollout does not apply. Use sampling"):
        explain_clip(FRAMES[:4], model=explainer, method="rollout", preset="paper")
    features = explain_clip(FRAMES[:4], model=explainer, method="gradcam")  # of the encoder: the predictor does not run
    assert features.grid.shape == (2, 4, 4) and np.ptp(features.grid) > 0


def test_the_command_loads_a_folder_and_its_preprocessing(tmp_path):
    built("VideoMAE", num_labels=5).save_pretrained(tmp_path / "model")
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "crop_size": {"height": 32, "width": 32}}
    settings |= {"size": {"shortest_edge": 32}, "image_processor_type": "VideoMAEImageProcessor"}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    video(tmp_path / "clip.mp4", np.repeat(FRAMES, 2, axis=0))
    arguments = ["explain", str(tmp_path / "clip.mp4"), "--model", str(tmp_path / "model"), "--class", "1"]
    result = CliRunner().invoke(cli, [*arguments, "--json", "-o", str(tmp_path / "map.png")])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["frames"] == 8 and len(record["frame_shares"]) == 4
    assert (tmp_path / "map.png").stat().st_size > 10_000
    refused = CliRunner().invoke(cli, ["explain", str(sample_images()[0]), "--model", "demo", "--frames", "4"])
    assert refused.exit_code == 2 and "--frames requires a video" in refused.stderr
