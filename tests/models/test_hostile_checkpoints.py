"""Checkpoint files that are damaged or hostile: an error in one line, no file touched, memory bounded."""

import io
import json
import pickle
import random
import warnings
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save

import vitflow
from tests.mutations import mutated
from vitflow.errors import VitflowError

ID = "test_vit"
MUTANTS = 130  # of each of the two kinds of file
# Memory that loading a file of 1.5 MB may take beyond what the process has: torch's own buffers and a model or two.
ALLOWED_MB = 300


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
    numbers = {name: value.float() for name, value in entry.items()}
    return {
        "bomb.pth": bomb.getvalue(),
        "nested.pth": torch_file(nested),
        "views.pth": torch_file(views),
        "head.pth": torch_file(head),
        "empty_head.safetensors": save(entry | {"head.weight": torch.zeros(10**12, 0)}),
        "sparse.pth": torch_file(sparse),
        "meta.pth": torch_file({name: value.to("meta") for name, value in entry.items()}),
        "int8.safetensors": save({name: value.to(torch.int8) for name, value in entry.items()}),
        "complex.pth": torch_file({name: value.to(torch.complex64) for name, value in numbers.items()}),
        "scalars.safetensors": save({name: torch.tensor(0.5) for name in entry}),
        "names.pth": torch_file({1: entry["norm.weight"], None: entry["norm.weight"], ("a",): entry["norm.weight"]}),
        "legacy.pth": torch_file(entry, _use_new_zipfile_serialization=False)[:-1000],
        "png.pth": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        "recursion.pth": b"\x80\x02" + b"]" * 10**6 + b".",
        "plain.pth": pickle.dumps([1, 2, 3]),
    }


def peak_mb(*, forget: bool = False) -> float:
    """The most memory that this process has had since the peak was last forgotten, in MB; 0 where Linux is not."""
    if not Path("/proc/self/clear_refs").exists():
        return 0.0
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def attempt(path: Path, refused: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = vitflow.load_model(path) if path.stem.startswith("own") else vitflow.load_model(ID, checkpoint=path)
        except VitflowError as error:
            assert "\n" not in str(error) and len(str(error)) < 3000, error
            refused.append(path.name)
        else:
            assert sum(value.numel() for value in model.parameters()) < 10**6


@pytest.mark.slow
def test_hundreds_of_mutated_checkpoints_give_errors_in_one_line_and_take_no_memory(tmp_path, capsys):
    chance, entry = random.Random(0), weights()
    sources = {".safetensors": save(entry), ".pth": torch_file({"model": entry, "epoch": 3})}
    folder = tmp_path / "work"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps({"architecture": ID, "num_classes": 5}))
    before = peak_mb(forget=True)
    refused: list[str] = []
    for suffix, data in sources.items():
        for number in range(MUTANTS):
            path = folder / f"own{suffix}" if suffix == ".safetensors" and number % 3 else folder / f"{number}{suffix}"
            changed = mutated(data, chance)
            path.write_bytes(changed)
            attempt(path, refused)
            assert path.read_bytes() == changed and sorted(folder.iterdir()) == sorted([config, path])
            path.unlink()
    grown = peak_mb() - before
    with capsys.disabled():
        print(f"\n{2 * MUTANTS} mutated checkpoints: {len(refused)} refused, {grown:.0f} MB of memory more at the peak")
    assert len(refused) > MUTANTS
    assert grown < ALLOWED_MB


def test_hostile_checkpoints_are_refused(tmp_path):
    files, before, refused = hostile(), peak_mb(forget=True), []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        attempt(tmp_path / name, refused)
    assert refused == list(files)
    (tmp_path / "model.safetensors").write_bytes(save(weights()))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_giant_patch14_224"}))
    with pytest.raises(VitflowError, match="do not fit local-dir:"):
        vitflow.load_model(tmp_path)
    assert peak_mb() - before < ALLOWED_MB
