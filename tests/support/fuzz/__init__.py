"""Random calls of every operator, checked against independent formulas: ``make fuzz``.

A call is drawn as plain data (``call.Call``): shapes, layouts, seeds of values, options. A kernel
computes it, and its results and gradients are compared with a formula in float64. The formulas are
written a second time here, from ``docs/semantics.md`` and the papers. They share nothing with
``trifuse.reference``, so a mistake there is found.

| file | holds |
|---|---|
| ``draws.py`` | random decisions, recorded so that a failure can be shrunk |
| ``tensors.py`` | tensors as data: values, special values, memory layouts, Python code |
| ``rounding.py`` | how large an error may be |
| ``philox.py`` | the generator of Salmon et al., in NumPy |
| ``call.py`` | a call: how it runs, its expected results, how it is printed |
| ``attention.py``, ... | an operator: which calls to draw, and its formula |
| ``__main__.py`` | the command: workers, progress, failures |
"""
