"""Draw the pictures of the README with the bundled model: python examples/draw_readme_pictures.py"""

from pathlib import Path

import vitflow
from vitflow.demo import sample_pictures

ASSETS = Path(__file__).resolve().parent.parent / "assets"
WIDE = ["disc_star_and_crescent.png", "ring_and_triangle.png"]
METHODS = ["attention", "rollout", "flow", "gradient_rollout", "gae", "gradcam", "random"]
CLASSES = ["orange disc", "yellow star", "pink crescent"]


def main() -> None:
    pictures = {path.name: path for path in sample_pictures()}
    explainer = vitflow.Explainer("demo", device="cpu")
    explainer.explain(pictures[WIDE[0]], method="flow")  # compiles the flow's search before the first picture is timed
    wide = vitflow.compare([pictures[name] for name in WIDE], model=explainer, methods=METHODS)
    print(wide.save(ASSETS / "overview.png"))
    methods = ["rollout", "gradient_rollout", "gae", "gradcam"]
    classes = vitflow.compare(pictures[WIDE[0]], model=explainer, methods=methods, targets=CLASSES)
    print(classes.save(ASSETS / "classes.png"))


if __name__ == "__main__":
    main()
