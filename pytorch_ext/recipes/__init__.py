"""Recognises, by their code, the parts of other libraries' modules that trifuse can compute.

- :mod:`trifuse.recipes.code` reads the code of classes;
- :mod:`trifuse.recipes.attention_interface` finds the models that can have
  ``attn_implementation="trifuse"``;
- :mod:`trifuse.recipes.norms` recognises RMSNorm, which every library writes for itself;
- :mod:`trifuse.recipes.sublayers` runs sums followed by a norm, and linear layers followed by an
  activation, as one call each: :mod:`trifuse.recipes.rewriting` finds and replaces them in a
  method's code;
- :mod:`trifuse.recipes.activations` names the activations of transformers;
- :mod:`trifuse.recipes.gates` finds gated feed-forward networks;
- :mod:`trifuse.recipes.conv1d` is the linear layer whose weight is stored transposed, and
  :mod:`trifuse.recipes.falcon_linear` Falcon's;
- :mod:`trifuse.recipes.boundaries` joins the sum at a layer's end with the norm at the beginning of
  the next layer, and :mod:`trifuse.recipes.lone_sums` finds the sums that stay torch's;
- :mod:`trifuse.recipes.written_out` finds attentions that compute their softmax themselves;
- :mod:`trifuse.recipes.own_biases` keeps biases of relative positions as tables;
- :mod:`trifuse.recipes.window_biases` makes attention read the biases of windows from a table;
- :mod:`trifuse.recipes.disentangled` keeps DeBERTa-v2's terms of distances as tables, and makes its
  attention accept packed tokens;
- :mod:`trifuse.recipes.layers` finds layers with BERT's code, :mod:`trifuse.recipes.embeddings`
  embeddings, and :mod:`trifuse.recipes.models` models;
- :mod:`trifuse.recipes.known_layers` finds layers with the code of Llama, GPT-2, CLIP and others
  (:mod:`trifuse.recipes.known_code`; that of their attentions in
  :mod:`trifuse.recipes.known_attentions`), and :mod:`trifuse.recipes.caches` the caches to which
  they append;
- :mod:`trifuse.recipes.tokenwise` decides which modules treat tokens one by one:
  :mod:`trifuse.recipes.reader` follows their code, with the layouts of values that
  :mod:`trifuse.recipes.layouts` defines;
- :mod:`trifuse.recipes.rotations` recognises the modules that make rotary embeddings of positions,
  and :mod:`trifuse.recipes.rotary_functions` the functions that rotate queries and keys by them;
- :mod:`trifuse.recipes.arguments` names the arguments of layers that mean the same everywhere;
- :mod:`trifuse.recipes.stacks` finds encoders and decoders made of such modules, and makes them
  leave out the padding;
- :mod:`trifuse.recipes.passes` runs a batch through their layers;
- :mod:`trifuse.recipes.packed_models` finds models with BERT's code, which then embed real tokens
  only.

No list of model names is involved: a class that nobody has seen before is served if its code has
one of these forms.
"""
