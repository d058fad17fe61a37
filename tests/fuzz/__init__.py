"""Random calls of every operator against formulas of their own: ``make fuzz``.

A call is drawn as plain data (``call.Call``): shapes, layouts, seeds of values, options. It is put
to a kernel, and what comes back, gradients too, is compared with a formula in float64. The formulas
are written here once more, from ``docs/semantics.md`` and the papers, and share nothing with
``trifuse.reference``: a mistake there would show.

| file | holds |
|---|---|
| ``draws.py`` | decisions at random, on record, so that a failure can be shrunk |
| ``tensors.py`` | tensors as data: values, special values, memory layouts, Python code |
| ``rounding.py`` | how far off a result may be |
| ``philox.py`` | the generator of Salmon et al., in NumPy |
| ``call.py`` | a call: what it gives, what it must give, how it is printed |
| ``attention.py``, ... | an operator: which calls to draw, and its formula |
| ``__main__.py`` | the command: workers, progress, failures |
"""
