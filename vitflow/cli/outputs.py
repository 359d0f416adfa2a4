"""Where the commands write, what they refuse to write over, and what they say of a place that they cannot write to."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from click import get_current_context

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.files import is_folder


class CannotWrite(VitflowError):
    """A file cannot be written where the user wants it."""


@contextmanager
def writing(path: Path, flag: str = "-o") -> Iterator[None]:
    """Tell what is wrong with a place that cannot be written; never by the name of an unfinished file.

    Raises:
        CannotWrite: what runs inside could not write.
    """
    try:
        yield
    except OSError as error:
        words = f"Cannot write {printable(path)}: {error.strerror or error}. Choose another place with {flag}."
        raise CannotWrite(words) from error


def check_images(images: Sequence[Path], outputs: Iterable[Path]) -> None:
    """Raise OptionError for a folder among the images, for which there is a command, and for an output over one."""
    for image in filter(is_folder, images):
        command, name = get_current_context().info_name, printable(image)
        raise OptionError(
            f"Expected images, got the folder {name}: vitflow folder {name} -o OUTPUT explains every image of a "
            f"folder, vitflow {command} the ones that you name."
        )
    read = {image.resolve() for image in images}
    for output in outputs:
        if output.resolve() in read:
            raise OptionError(f"The output would overwrite the image {str(output)!r}: choose another output.")


def output_file(images: Sequence[Path], output: str | None, name: str, suffixes: Sequence[str]) -> Path:
    """Where a command writes its one file: under this name here, or in a folder, which need not be there yet.

    Raises:
        OptionError: the file would have none of the suffixes that the command writes, or would overwrite an image; an
            image is a folder.
    """
    path = Path(name if output is None else output)
    if output is not None and names_folder(output):
        path /= name
    elif output is not None:
        check_suffix(path, suffixes, ", or a folder with / at its end")
    check_images(images, [path])
    return path


def name_for(images: Sequence[Path], kind: str) -> str:
    """What a command calls its one file, such as "cat-and-2-more-compare.png".

    >>> name_for([Path("cat.jpg"), Path("dog.jpg")], "features.png")
    'cat-and-1-more-features.png'
    """
    others = f"-and-{len(images) - 1}-more" if len(images) > 1 else ""
    return f"{images[0].stem}{others}-{kind}"


def names_folder(output: str) -> bool:
    """Whether an output can only be meant as a folder."""
    return output.endswith(("/", os.sep)) or is_folder(output)


def check_suffix(output: Path, suffixes: Sequence[str], more: str = "") -> None:
    """Raise OptionError where an output has none of the suffixes that a command writes."""
    if output.suffix.lower() not in suffixes:
        raise OptionError(f"Expected an output that ends in {', '.join(suffixes)}{more}, got {str(output)!r}.")
