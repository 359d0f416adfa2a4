"""Checkpoint files that somebody made on purpose: an error in one line, before memory is taken."""

import io
import json
import zipfile

import pytest
import timm
import torch
from safetensors.torch import save

import vitflow
from vitflow.errors import VitflowError

ID = "test_vit"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return timm.create_model(ID, num_classes=5).half().state_dict()


def torch_file(value: object, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def hostile() -> dict[str, bytes]:
    """Files that somebody made on purpose."""
    entry = weights()
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 2**27)
    nested: object = entry
    for _ in range(100):
        nested = {"model": nested}
    views = entry | {"pos_embed": torch.zeros(1, 1, 1).expand(1, 2**40, entry["pos_embed"].shape[2])}
    head = entry | {"head.weight": torch.zeros(1, 1).expand(10**11, entry["head.weight"].shape[1])}
    sparse = entry | {"norm.weight": entry["norm.weight"].float().to_sparse()}
    return {
        "bomb.pth": bomb.getvalue(),
        "nested.pth": torch_file(nested),
        "views.pth": torch_file(views),
        "head.pth": torch_file(head),
        "empty_head.safetensors": save(entry | {"head.weight": torch.zeros(10**12, 0)}),
        "sparse.pth": torch_file(sparse),
        "meta.pth": torch_file({name: value.to("meta") for name, value in entry.items()}),
        "names.pth": torch_file({1: entry["norm.weight"], None: entry["norm.weight"], ("a",): entry["norm.weight"]}),
        "recursion.pth": b"\x80\x02" + b"]" * 10**6 + b".",
    }


def test_hostile_checkpoints_are_refused(tmp_path):
    for name, content in hostile().items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(VitflowError) as refused:
            vitflow.load_model(ID, checkpoint=tmp_path / name)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 3000, name
    (tmp_path / "model.safetensors").write_bytes(save(weights()))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_giant_patch14_224"}))
    with pytest.raises(VitflowError, match="do not fit local-dir:"):
        vitflow.load_model(tmp_path)
