"""Find the pictures that annotations name, and nothing outside the folders where they are looked for."""

import os
from collections.abc import Sequence
from pathlib import Path

from vitflow.errors import OptionError
from vitflow.files import is_file
from vitflow.pictures.images import is_image_name

_LONGEST_TOLD = 200  # characters of a name that an error repeats


class PictureFinder:
    """Find the pictures that annotations name: by path below one of the folders, or by name anywhere below them.

    Nothing outside these folders is touched, whether a name leads there by its path or by a link.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder for folder in folders if folder.is_dir()]
        self._inside = [make(folder) for folder in self.folders for make in (os.path.abspath, os.path.realpath)]
        self._names: dict[str, Path] | None = None

    def find(self, file: str) -> Path:
        """The picture's path; where there is none, the path at which it was expected first.

        Raises:
            OptionError: it lies outside the folders.
        """
        first, outside = None, False
        for folder in self.folders:
            place = folder / file
            if not self._holds(os.path.abspath(place)):  # noqa: PTH100 - follows no link
                continue
            if not self._holds(os.path.realpath(place)):
                outside = True
            elif is_file(place):
                return place
            elif first is None:
                first = place
        if self._names is None:  # only where a name is not enough: the folders may be large
            self._names = self._index()
        name = Path(file).name
        found = self._names.get(name) or self._names.get(Path(name).stem)
        if found is not None:
            return found
        if first is None or outside:
            raise OptionError(
                f"The annotations name {file[:_LONGEST_TOLD]!r}, which lies outside the folders with pictures ("
                f"{', '.join(repr(str(folder)) for folder in self.folders)}). If that is meant, name its folder with "
                "--images (images=…)."
            )
        return first

    def _holds(self, place: str) -> bool:
        return any(place == root or place.startswith(os.path.join(root, "")) for root in self._inside)  # noqa: PTH118

    def _index(self) -> dict[str, Path]:
        """Pictures by name and by name without suffix; the first folder goes first, and no link leads out."""
        index: dict[str, Path] = {}
        for root in self.folders:
            for folder, subfolders, names in os.walk(root):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                for file in (Path(folder, name) for name in sorted(names) if is_image_name(name)):
                    if is_file(file) and self._holds(os.path.realpath(file)):
                        index.setdefault(file.name, file)
                        index.setdefault(file.stem, file)
        return index
