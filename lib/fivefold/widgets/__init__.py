"""Figures with controls: every one is a figure of `plots` that is drawn again when a control is moved.

    column_row_pair()            two matrices over t ranks: what a rank holds, what travels, how long it takes

The picture stands in the notebook by itself, so that it is there without a running kernel too.
"""

from fivefold.widgets.pair import column_row_pair

__all__ = ["column_row_pair"]
