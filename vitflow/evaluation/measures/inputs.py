"""Which input does an output use? The score of a model with several images if each is replaced by its mean colour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number
from vitflow.evaluation.statistics import Difference, paired_differences

#: Label of the images all replaced at once.
ALL = "all images"


@dataclass(frozen=True, slots=True)
class InputScores:
    """Scores of observations with each of their images replaced by its mean colour.

    Attributes:
        score: the score of each observation, float64 [observations].
        blank: the scores without each image, by its name, and without "all images"; float64 [observations].
    """

    score: NDArray[np.float64]
    blank: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def drops(self) -> dict[str, Difference]:
        """Difference of the score with all images and without each of them, with a 95 % interval over observations.

        `drops[name].is_clear` is True if there are at least ten observations and the interval excludes 0.
        """
        labels, values = ["score", *self.blank], np.stack([self.score, *self.blank.values()], axis=1)
        pairs = [(0, index) for index in range(1, len(labels))]
        return dict(zip(self.blank, paired_differences(labels, values, pairs), strict=True))

    def __str__(self) -> str:
        width = max(map(len, self.blank))
        lines = [f"mean score {self.score.mean():.4g} ({len(self.score)} observations)"]
        for name, drop in self.drops.items():
            mean, low, high = drop.estimate.mean, drop.estimate.low, drop.estimate.high
            interval = "" if low is None else f" ({low:.4g} to {high:.4g})"
            lines.append(f"without {name:{width}}  lower by {mean:.4g}{interval}")
        return "\n".join(lines).replace("-", "−")


def blank_inputs(
    score: Callable[[dict[str, Tensor]], Tensor],
    images: Mapping[str, Tensor],
    *,
    random_seed: int = 0,
) -> InputScores:
    """Compute the score of a model with each of its images replaced by its mean colour, and with all of them.

    An image without which the score is the same is not used, whatever a map over it shows. The mean colour is that of
    each image, or frame, of each observation. Gradients are not recorded.

    Args:
        score: maps images by name to the score of each observation, [observations]: runs the model, in eval mode, and
            selects what is asked about, such as the logit of a class or a component of an action.
        images: each [observations, channels, height, width], or with further axes before the channels.
        random_seed: seed of torch's random numbers in each run, for models that draw some.

    Raises:
        OptionError: no image.
        ShapeError: the images are not of the same observations, or the scores are not [observations] or not finite.

    >>> left, right = torch.rand(12, 3, 4, 4), torch.rand(12, 3, 4, 4)
    >>> result = blank_inputs(lambda images: images["left"].std(dim=(1, 2, 3)), {"left": left, "right": right})
    >>> result.drops["left"].is_clear, result.drops["right"].estimate.mean
    (True, 0.0)
    """
    if not images:
        raise OptionError("Expected at least one image by its name, got none.")
    shapes = {name: tuple(image.shape) for name, image in images.items()}
    if any(len(shape) < 4 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        raise ShapeError(
            f"Expected images [observations, channels, height, width] of the same observations, got {shapes}."
        )
    mean = {}
    for name, image in images.items():
        colour = image.to(torch.promote_types(image.dtype, torch.float32)).mean(dim=(-2, -1), keepdim=True)
        colour = colour if image.is_floating_point() else colour.round()
        mean[name] = colour.to(image.dtype).expand_as(image)
    count, devices = next(iter(shapes.values()))[0], {image.device for image in images.values() if image.is_cuda}
    seed = whole_number("random_seed", random_seed, 0)

    def run(given: Mapping[str, Tensor]) -> NDArray[np.float64]:
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            scores = torch.as_tensor(score({**images, **given}))
        if tuple(scores.shape) not in ((count,), (count, 1)) or not torch.isfinite(scores).all():
            raise ShapeError(
                f"Expected a finite score of each of {count} observations, got a tensor {list(scores.shape)}: select "
                "one number per observation, such as outputs[:, 0]."
            )
        return scores.reshape(count).cpu().double().numpy()

    changed: dict[str, Mapping[str, Tensor]] = {name: {name: mean[name]} for name in images}
    if len(images) > 1:
        changed[ALL] = mean
    return InputScores(run({}), {name: run(given) for name, given in changed.items()})
