"""The parts of :func:`trifuse.fuse`.

- :mod:`trifuse.fusing.steps` has the changes that it makes and undoes;
- :mod:`trifuse.fusing.swaps` says which class each kind of module gets;
- :mod:`trifuse.fusing.attention_choice` switches models of transformers to trifuse's attention;
- :mod:`trifuse.fusing.freezing` packs weights for good;
- :mod:`trifuse.fusing.remains` finds what runs as before, and why;
- :mod:`trifuse.fusing.report` puts all this into a report.
"""
