"""The environment of all tests: import this before torch.

It sets variables that torch, MKL and Triton read when they are loaded, and makes Triton's
interpreter faster.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

# Waiting threads sleep instead of spinning, because the cores may be busy with another worker's
# tests, and some tests have more threads than cores. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Errors are compared with torch's, which depend on the order of MKL's sums. With these instructions
# Intel's processors sum much like others. MKL reads this when torch is loaded.
with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
    if "GenuineIntel" in cpuinfo.read():
        os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")

import torch

if not torch.cuda.is_available():
    # Triton reads this when it decorates a kernel, so it must be set before the import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ModuleNotFoundError):  # it needs a package that torch does not install
    # This loads a Hypothesis profile, so ours is loaded later. Some versions also import Triton.
    import torch.testing._internal.common_utils

from trifuse import backends


def _patch_language_once_a_launch() -> None:
    """Makes Triton's interpreter patch triton.language once per launch.

    It also patches it whenever one jitted function calls another, which changes nothing and takes
    half of a test's time.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # this version of Triton patches differently

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    language = interpreter.tl
    patched: set[str] = set()

    class Scope(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @functools.cache
    def seen_from(module: str) -> set[str]:
        """Returns which language modules are globals of a module; the interpreter patches them."""
        known = vars(sys.modules[module]).values()
        return {m.__name__ for m in (language, language.core) if any(m is v for v in known)}

    def patch_lang(fn: Any) -> Any:
        if patched and seen_from(fn.__module__) <= patched:
            return Scope()
        patched.update(seen_from(fn.__module__))
        return patch(fn)

    interpreter._patch_lang, interpreter._LangPatchScope = patch_lang, Scope


def _keep_block_types() -> None:
    """Makes Triton's interpreter create each block type, and each NumPy type, only once.

    By default it creates several for each operation, which takes a fifth of a test's time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    initialise, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}  # attributes, among them the element's type, by its id
    numpy_types: dict[str, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        known = blocks.get(key := (id(element_ty), tuple(shape)))
        if known is None:
            initialise(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        else:
            vars(self).update(known)

    def get_np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(of)
        return numpy_types[name]

    core.block_type.__init__, interpreter._get_np_dtype = init, get_np_dtype


if backends._HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1":
    _patch_language_once_a_launch()
    _keep_block_types()
