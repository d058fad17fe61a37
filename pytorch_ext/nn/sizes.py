"""A check of the sizes from which torch's constructors make parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from trifuse.ops import _checks

Class = TypeVar("Class", bound=type[nn.Module])


def checked(*names: str) -> Callable[[Class], Class]:
    """Makes a class's constructor report a size that is too large for arithmetic in 64 bits.

    A parameter may have four times as many rows, for the gates of an LSTM, so a size may be 2^60 at
    most. The constructor checks everything else.

    Args:
        names: the names of the arguments that are sizes, or lists of sizes.

    Raises:
        ValueError: by the constructor, if a size is an int above 2^60.
    """

    def decorate(cls: Class) -> Class:
        init = cls.__init__
        arguments = [*inspect.signature(init).parameters]

        @functools.wraps(init)
        def checked_init(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(arguments, args, strict=False)) | kwargs
            for name in names:
                value = given.get(name)
                for size in value if isinstance(value, Sequence) else [value]:
                    if isinstance(size, int) and size > _checks.MAX_DISTANCE:
                        raise _checks.fail(name, "a size of at most 2^60", size)
            init(*args, **kwargs)

        cls.__init__ = checked_init  # type: ignore[method-assign]
        return cls

    return decorate
