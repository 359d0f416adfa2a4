"""Help in sections: what a command can be told of the model, the pictures, the methods, the drawing and the output."""

from collections.abc import Iterable
from typing import Any

import click

from vitflow.explaining.method import Method
from vitflow.explaining.method_options import OPTIONS
from vitflow.explaining.method_table import list_methods

# Columns for the options themselves, the same in every section.
_WIDTH = 26

# The options under each title, in this order. The options of single methods follow those of Method.
_SECTIONS = {
    "Model": "model checkpoint num_classes class_names name device dtype batch_size trust_remote_code",
    "Picture": "data_option images recursive glob limit fit workers max_pixels",
    "Text": "caption prompt generate token",
    "Question": "prompts templates alone like",
    "Method": ("method methods method_names target targets against causal of_layer foreground neutral through_tower"),
    "Measuring": "metrics replace_by points blurred_twin sanity_pictures resamples seed",
    "Cluster": "engine address actors",
    "Drawing": "cmap alpha vmin vmax interpolation background contours same_scale timings",
    "Output": (
        "html png view hide_special hide_stop_words output figure overlays format save_map manifest "
        "report resume max_size as_json"
    ),
}


class SectionedCommand(click.Command):
    """A command whose help has its options under titles, and those of methods under the methods that have them.

    Args:
        methods: those of the command; None for all that explain images.
    """

    def __init__(self, *args: Any, methods: Iterable[Method] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._methods = list(list_methods() if methods is None else methods)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section; what belongs to none is in the last."""
        options = {str(param.name): param for param in self.get_params(ctx) if isinstance(param, click.Option)}

        def write(title: str, names: Iterable[str]) -> None:
            records = [options.pop(name).get_help_record(ctx) for name in names if name in options]
            rows = [(record[0].ljust(_WIDTH), record[1]) for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_WIDTH)

        for title, names in _SECTIONS.items():
            write(title, names.split())
            if title == "Method":
                for having, shared in _options_by_methods(self._methods):
                    write(f"Options of {having}", shared)
        write("More", list(options))


def _options_by_methods(methods: list[Method]) -> list[tuple[str, list[str]]]:
    """Methods that have options in common, in words, and the names of these: those of the most methods first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in OPTIONS:
        groups.setdefault(tuple(method.name for method in methods if method.accepts(name)), []).append(name)
    titled = []
    for having, names in sorted(groups.items(), key=lambda group: -len(group[0])):
        others = [method.name for method in methods if method.name not in having]
        but = f" but {', '.join(others)}" if others else ""
        those = f"all methods{but}" if len(others) <= 3 < len(having) else ", ".join(having)
        titled.append((those, names))
    return titled
