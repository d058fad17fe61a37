"""The modules named as torch's take torch's arguments, in order and with torch's defaults."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import trifuse.nn

TWINS = [name for name in trifuse.nn.__all__ if hasattr(nn, name)]


def arguments(function):
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", TWINS)
def test_constructor(name):
    theirs = arguments(getattr(nn, name))
    if issubclass(getattr(nn, name), nn.RNNBase):  # torch's own says no more than *args
        theirs = [each for each in arguments(nn.RNNBase) if each[0] not in ("mode", "proj_size")]
    ours = arguments(getattr(trifuse.nn, name))
    assert [each for each in ours if each[0] != "proj_size"][: len(theirs)] == theirs


@pytest.mark.parametrize("name", TWINS)
def test_forward(name):
    theirs = arguments(getattr(nn, name).forward)
    assert arguments(getattr(trifuse.nn, name).forward)[: len(theirs)] == theirs
