"""Size and speed of the explorer's page: python -m benchmarks.explorer [--skip-large]

Prints for each model the page's size, what it had no room for, and how long a click takes in the browser: from the
click to the map on the photograph, the median and the longest of nine. Random weights attend more evenly than trained
ones, and compress better. The trained ViT-Tiny, where the shared data are, has as many layers and tokens as ViT-B: its
fused attention takes what a trained ViT-B's takes.
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from playwright.sync_api import Browser, sync_playwright

from vitflow import Explainer, explore
from vitflow.demo import sample_images

SHARED = Path(os.environ.get("VITFLOW_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
CHECKPOINT = SHARED / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
# As many patches as 37 × 37: with the class token 1,370 tokens.
LARGE = 592

CLICKS = """async ([patches, ratio]) => {
    take({ discard_ratio: ratio });
    await update();
    const idle = () => new Promise((done) => setTimeout(done, 100)), times = [];
    for (const patch of patches) {
        const begun = performance.now();
        await ask("a", patch);
        times.push(performance.now() - begun);
        drawn++;  // the strip of layers need not be waited for
        await idle();
    }
    return times;
}"""
SLIDER = """async () => {
    const begun = performance.now();
    take({ discard_ratio: 0.85 });
    await update();
    return performance.now() - begun;
}"""


def measure(browser: Browser, name: str, model: Any, **options: Any) -> None:
    """Print one line."""
    begun = time.perf_counter()
    page = explore(photo(), model=Explainer(model), methods=["gradcam"], **options)
    made = time.perf_counter() - begun
    with TemporaryDirectory() as folder:
        shown = browser.new_page()
        shown.goto(page.save(Path(folder) / "page.html").as_uri())
        shown.evaluate("async () => { await begin({}); drawn++; }")
        grid = shown.evaluate("gridOf(images[0])")
        patches = [[(5 * k) % grid[0], (3 * k + 2) % grid[1]] for k in range(9)]
        actual = {ratio: sorted(shown.evaluate(CLICKS, [patches, ratio])) for ratio in (0.0, 0.9)}
        slider = shown.evaluate(SLIDER)
        shown.close()
    clicks = "; ".join(
        f"discard {ratio:g}: {entry[4]:.0f} ms, at most {entry[-1]:.0f}" for ratio, entry in actual.items()
    )
    print(
        f"{name}: {len(page.html) / 1e6:.1f} MB, made in {made:.0f} s; a click, {clicks}; another ratio {slider:.0f} ms"
    )
    for note in page.notes[:-1]:
        print(f"    {note}")


def photo() -> Any:
    """A photograph, where there are some; else a drawn image."""
    photographs = sorted((SHARED / "photos").glob("*.png"))
    return photographs[3] if photographs else sample_images()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-large", action="store_true", help="leave 1,370 tokens out")
    large = not parser.parse_args().skip_large
    torch.manual_seed(0)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        base = timm.create_model("vit_base_patch16_224")
        measure(browser, "ViT-B/16 at 224, random weights, without single heads", base, max_size=8)
        measure(browser, "ViT-B/16 at 224, random weights", base)
        if large:
            wide = timm.create_model("vit_base_patch16_224", img_size=LARGE)
            measure(browser, "ViT-B/16, 1,370 tokens, random weights", wide)
        if CHECKPOINT.is_file():
            name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
            tiny = timm.create_model(name, checkpoint_path=str(CHECKPOINT))
            measure(browser, "trained ViT-Tiny/16 at 224", tiny)
            measure(browser, "trained ViT-Tiny/16 at 224, without single heads", tiny, max_size=6.5)
            if large:
                tiny.set_input_size(img_size=LARGE)
                tiny.pretrained_cfg["input_size"] = (3, LARGE, LARGE)
                measure(browser, "trained ViT-Tiny/16, 1,370 tokens", tiny)
        browser.close()


if __name__ == "__main__":
    main()
