"""Products of linear layers in FP8. Nothing here is imported without ``--fp8`` or ``shard(fp8=)``.

``codes.py`` turns tensors into codes of 8 bits and scales, and ``product.py`` multiplies them.
``ops.py`` defines the codes in torch's operators; ``kernels.py`` makes the same ones on a GPU, and
is imported only there. ``layers.py`` is what linear layers call, and keeps the codes of weights;
``support.py`` says which GPUs can multiply so; ``tensorwise.py`` is the recipe with one scale a
tensor; ``modules.py`` has both recipes for users' modules. What they return does not depend on the
layout: neither a tile nor a block crosses a cut of the mesh, and ranks agree on the scales of whole
tensors.
"""
