"""A program exported by torch.export returns the logits and the map of rollout."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import vitflow
from tests.small import DATA

BATCH = torch.export.Dim("batch", min=1, max=8)


class WithRollout(nn.Module):
    def __init__(self, model: nn.Module, readout: torch.Tensor, **options) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.register_buffer("readout", readout)
        for block in model.blocks:
            block.attn.fused_attn = False

    def forward(self, pixels):
        layers = []
        hooks = [
            block.attn.attn_drop.register_forward_pre_hook(lambda module, inputs: layers.append(inputs[0]))
            for block in self.model.blocks
        ]
        logits = self.model(pixels)
        for hook in hooks:
            hook.remove()
        return logits, vitflow.attention_rollout(layers, readout=self.readout, **self.options)


def exported(pool: str, **options):
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "depth": 3, "num_classes": 5, "global_pool": pool}
    model = timm.create_model("vit_tiny_patch16_224", **size, class_token=pool == "token").eval()
    readout = torch.eye(17)[0].clone() if pool == "token" else torch.full((16,), 1 / 16)
    program = torch.export.export(
        WithRollout(model, readout, **options).eval(),
        (torch.randn(3, 3, 32, 32),),
        dynamic_shapes={"pixels": {0: BATCH}},
        strict=False,
    )
    return model, program


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # in torch.export.load of torch 2.10
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_exported_program_gives_the_map_of_the_paper(pool, tmp_path):
    model, program = exported(pool)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    explainer = vitflow.Explainer(model, data_config=DATA)
    for count in (1, 4):
        pixels = torch.rand(count, 3, 32, 32) * 2 - 1
        logits, row = loaded(pixels)
        with torch.no_grad():
            torch.testing.assert_close(logits, model(pixels))
        maps = explainer.explain_batch(pixels, method=("rollout", {"preset": "paper"}))
        grids = row[:, model.num_prefix_tokens :].reshape(count, 4, 4).detach().numpy()
        np.testing.assert_allclose(grids, [saliency.grid for saliency in maps], rtol=1e-5)
        assert np.ptp(grids) > 1e-4


def test_options_that_depend_on_no_values_can_be_traced_and_others_are_refused():
    options = {"head_fusion": "max", "residual": 0.3, "start_layer": 2}
    model, program = exported("token", **options)
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        expected = WithRollout(model, torch.eye(17)[0], **options)(pixels)[1]
        torch.testing.assert_close(program.module()(pixels)[1], expected, rtol=1e-5, atol=1e-8)
    for wrong in ({"discard_ratio": 0.5}, {"residual": 0.0}):
        with pytest.raises(vitflow.VitflowError, match=r"torch\.export requires"):
            exported("token", **wrong)
