"""Output paths of commands: defaults, checks, and errors for paths that cannot be written."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from click import get_current_context

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.files import is_folder


class CannotWrite(VitflowError):
    """An output file cannot be written."""


@contextmanager
def writing(path: Path, flag: str = "-o") -> Iterator[None]:
    """Turn an OSError into an error that names the output path, not the temporary file.

    Raises:
        CannotWrite: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        words = f"Cannot write {printable(path)}: {error.strerror or error}. Choose another place with {flag}."
        raise CannotWrite(words) from error


def check_images(images: Sequence[Path], outputs: Iterable[Path]) -> None:
    """Raise OptionError if an image is a folder, or if an output would overwrite an image."""
    for image in filter(is_folder, images):
        command, name = get_current_context().info_name, printable(image)
        raise OptionError(
            f"Expected images, got the folder {name}: use vitflow folder {name} -o OUTPUT for every image of a folder; "
            f"vitflow {command} takes image files."
        )
    read = {image.resolve() for image in images}
    for output in outputs:
        if output.resolve() in read:
            raise OptionError(f"The output would overwrite the image {str(output)!r}: choose another output.")


def output_file(images: Sequence[Path], output: str | None, name: str, suffixes: Sequence[str]) -> Path:
    """Return the path of a command's only output file: by default `name` in the current folder.

    Raises:
        OptionError: the suffix is not supported, the file would overwrite an image, or an image is a folder.
    """
    path = Path(name if output is None else output)
    if output is not None and names_folder(output):
        path /= name
    elif output is not None:
        check_suffix(path, suffixes, ", or a folder with / at its end")
    check_images(images, [path])
    return path


def name_for(images: Sequence[Path], kind: str) -> str:
    """Return the default name of a command's only output file, such as "cat-and-2-more-compare.png".

    >>> name_for([Path("cat.jpg"), Path("dog.jpg")], "features.png")
    'cat-and-1-more-features.png'
    """
    others = f"-and-{len(images) - 1}-more" if len(images) > 1 else ""
    return f"{images[0].stem}{others}-{kind}"


def names_folder(output: str) -> bool:
    """Return True if an output is a folder or ends in a separator."""
    return output.endswith(("/", os.sep)) or is_folder(output)


def check_suffix(output: Path, suffixes: Sequence[str], more: str = "") -> None:
    """Raise OptionError if an output has none of these suffixes."""
    if output.suffix.lower() not in suffixes:
        raise OptionError(f"Expected an output that ends in {', '.join(suffixes)}{more}, got {str(output)!r}.")
