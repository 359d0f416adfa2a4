"""Draw explorer, report and app as a browser shows them: python -m tools.draw_screenshots [--checkpoint WEIGHTS]

It takes Chromium, playwright, scikit-image and Gradio. Without --checkpoint the model's weights come from the hub.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import vitflow
from tools.draw_readme_images import load_photographs, parse, write_jpeg
from tools.drawn import keep
from vitflow.app import serve


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(__doc__, arguments)
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint), device="cpu")
    with tempfile.TemporaryDirectory() as desk, sync_playwright() as driver:
        photographs = load_photographs(Path(desk) / "photographs")
        explored = vitflow.explore(photographs["cat"], model=explainer, methods=["gae"]).save(Path(desk) / "cat.html")
        methods = ["rollout", "gae", "random"]
        run = vitflow.explain_folder(
            Path(desk) / "photographs", Path(desk) / "run", model=explainer, methods=methods, workers=0, report=True
        )
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 680})
        page.goto(Path(explored).as_uri())
        ask_about_a_patch(page)
        print(keep(write_jpeg(page.screenshot(), given.output / "explorer.jpg", 70), ["rollout"], given.output))
        page.goto(Path(str(run.report)).as_uri())
        page.wait_for_timeout(1000)
        print(keep(write_jpeg(page.screenshot(), given.output / "report.jpg", 70), methods, given.output))
        drawn = draw_app(browser.new_page(viewport={"width": 1100, "height": 960}))
        print(keep(write_jpeg(drawn, given.output / "app.jpg", 70), ["gae"], given.output))
        browser.close()


def draw_app(page: Page) -> bytes:
    """A drawn sample on the page of `vitflow app`, and a patch of its star clicked."""
    served = serve(["demo"])
    page.goto(served.local_url)
    page.locator("button.gallery-item").first.click()
    figure = page.locator("img[src*='-gae.png']")
    figure.wait_for()
    before, box = figure.get_attribute("src"), figure.bounding_box()
    assert box is not None
    figure.click(position={"x": 0.37 * box["width"], "y": 0.6 * box["height"]})
    page.locator(f"img[src*='-gae.png']:not([src='{before}'])").wait_for()
    page.wait_for_timeout(1000)
    image = page.screenshot()
    served.close(verbose=False)
    return image


def ask_about_a_patch(page: Page) -> None:
    """Click the cat's left eye, and wait until the map is drawn."""
    canvas = page.locator("canvas").first
    canvas.wait_for(state="visible")
    page.wait_for_timeout(1500)
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.35 * box["width"], box["y"] + 0.38 * box["height"])
    page.wait_for_timeout(1000)


if __name__ == "__main__":
    main()
