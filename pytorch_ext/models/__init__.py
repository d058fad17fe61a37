"""Reference models in plain ``torch.nn``: the eager baselines that :func:`trifuse.fuse` speeds up.

Nothing in this package imports the rest of trifuse, so it can be copied out and run with torch
alone.
"""
