"""Put controls above a figure: one function for every widget of the course."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fivefold.plots import Figure

NO_KERNEL = "Controls for the figure below: run this cell to use them."


def explore(draw: Callable[..., Figure], controls: Mapping[str, Any], also: Sequence[Any] = ()) -> None:
    """Show `draw(name=value, …)` under its controls, ipywidgets by name, and draw again when one of them changes.

    The figure is an output of its own, with its alt text, and stays where the controls cannot work: in a notebook that
    is read and not run, on a page made of one. Without a notebook nothing is shown. An error line of `draw` takes the
    figure's place until a control is moved on. `also` are widgets that move controls, such as a play button.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    from IPython.display import display
    from ipywidgets import HBox, Layout

    box = HBox([*controls.values(), *also], layout=Layout(flex_flow="row wrap", margin="0 0 4px 0"))
    display(box._repr_mimebundle_() | {"text/plain": NO_KERNEL}, raw=True)
    handle = display(_drawn(draw, controls), display_id=True)
    for control in controls.values():
        control.observe(lambda _: handle.update(_drawn(draw, controls)), "value")


def choice(name: str, options: Mapping[str, Any] | list, value: Any) -> Any:
    """A slider over a few values, which may have words of their own."""
    from ipywidgets import Layout, SelectionSlider

    pairs = list(options.items()) if isinstance(options, Mapping) else [(f"{option:,}", option) for option in options]
    look = {"style": {"description_width": "initial"}, "layout": Layout(width="20em")}
    return SelectionSlider(options=pairs, value=value, description=name, **look)


def switch(name: str, options: list[str], width: str = "6.5em") -> Any:
    """Buttons of which one is pressed: the first, to begin with. `width` is that of each."""
    from ipywidgets import ToggleButtons

    style = {"button_width": width, "description_width": "initial"}
    return ToggleButtons(options=options, value=options[0], description=name, style=style)


def _drawn(draw: Callable[..., Figure], controls: Mapping[str, Any]) -> Any:
    try:
        return draw(**{name: control.value for name, control in controls.items()})
    except ValueError as error:
        return _Line(str(error))


class _Line:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text
