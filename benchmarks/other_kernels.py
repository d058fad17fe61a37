"""Our operator on the backends that could serve a call but aren't chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from trifuse import backends

Function = Callable[[], Sequence[Tensor]]


def other_kernels(
    call: backends.Call,
    make: Callable[[], Function],
    check: Callable[[Function], None],
    variants: Mapping[tuple[str, str], Callable[[], Function]] | None = None,
) -> tuple[dict[str, Function], dict[str, str]]:
    """Our operator on each GPU backend that could serve a call but is not the one chosen for it.

    Empty on a CPU, and if a backend was requested by name.

    Args:
        call: the properties that decide which backends serve the call.
        make: returns the function to time; both are called under that backend.
        check: raises if the function's result is wrong; called under that backend, too.
        variants: further kernels by their backend and their name, each as ``make``.

    Returns:
        The functions to time, by name, and why others were left out.
    """
    functions: dict[str, Function] = {}
    refused: dict[str, str] = {}
    if call.device != "cuda" or backends._requested != "auto":
        return functions, refused
    chosen = backends.choose(call).backend
    candidates = {
        f"by {backend}": (backend, make)
        for backend in backends.ORDER
        if backend not in (chosen, "eager")  # eager torch is a peer
    }
    for (backend, variant), make_it in (variants or {}).items():
        candidates[f"by {backend}, {variant}"] = (backend, make_it)

    def by(backend: str, make: Callable[[], Function]) -> Function:
        with backends.backend(backend):
            made = make()

        def serve() -> Sequence[Tensor]:
            with backends.backend(backend):
                return made()

        return serve

    for name, (backend, make_it) in candidates.items():
        if backends._WHY_NOT[backend](call) is not None:
            continue
        try:
            function = by(backend, make_it)
            with backends.backend(backend):
                check(function)
        except (RuntimeError, AssertionError) as error:
            refused[f"ours {name}"] = str(error).partition("\n")[0]
        else:
            functions[name] = function
    return functions, refused
