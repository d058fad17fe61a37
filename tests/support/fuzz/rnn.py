"""``trifuse.rnn``, its layers, cells and modules: see :mod:`fuzz.gru`."""

from __future__ import annotations

import functools

from . import gru

draw = functools.partial(gru.draw, operator="rnn")
arguments, outputs, formula = gru.arguments, gru.outputs, gru.formula
poison, first = gru.poison, gru.first
