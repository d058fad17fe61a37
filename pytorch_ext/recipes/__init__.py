"""Which parts of other libraries' modules trifuse can compute, recognised by their code.

- :mod:`trifuse.recipes.code` reads the code of classes;
- :mod:`trifuse.recipes.norms` recognises RMSNorm, which every library writes for itself;
- :mod:`trifuse.recipes.sublayers` finds where a sum meets its norm, and a linear layer its
  activation;
- :mod:`trifuse.recipes.gates` finds gated feed-forward networks;
- :mod:`trifuse.recipes.conv1d` is the linear layer whose weight is stored transposed;
- :mod:`trifuse.recipes.boundaries` joins the sum at a layer's end with the norm that the next layer
  begins with;
- :mod:`trifuse.recipes.written_out` finds attentions that write their softmax out;
- :mod:`trifuse.recipes.own_biases` keeps biases of relative positions as tables;
- :mod:`trifuse.recipes.window_biases` lets attention read biases of windows from a table;
- :mod:`trifuse.recipes.disentangled` keeps DeBERTa-v2's terms of distances as tables, and lets
  its attention take packed tokens;
- :mod:`trifuse.recipes.layers` finds layers with BERT's code, :mod:`trifuse.recipes.embeddings`
  embeddings, and :mod:`trifuse.recipes.models` models;
- :mod:`trifuse.recipes.rotary_layers` finds layers with the code of Llama's or ModernBERT's, and
  :mod:`trifuse.recipes.caches` the caches to which they append;
- :mod:`trifuse.recipes.tokenwise` tells which modules treat tokens one by one:
  :mod:`trifuse.recipes.reader` follows their code, with the layouts of values that
  :mod:`trifuse.recipes.layouts` knows;
- :mod:`trifuse.recipes.rotations` knows the modules that make rotary embeddings of positions;
- :mod:`trifuse.recipes.arguments` names the arguments of layers that mean the same everywhere;
- :mod:`trifuse.recipes.stacks` finds encoders and decoders made of such modules, and lets them
  leave out the padding;
- :mod:`trifuse.recipes.passes` takes a batch through their layers;
- :mod:`trifuse.recipes.packed_models` finds models with BERT's code, which then embed real tokens
  only.

No list of model names is involved: a class that nobody has seen before is served if its code has
one of these forms.
"""
