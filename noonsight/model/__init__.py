"""The mathematics: what the model computes, how large it is, and how its arrays are split.

Knows nothing of ours but itself.

Files, lowest first: `config` (sizes) -> `params` (the tree, its initialisation) -> `layout` (splits over the mesh, how
devices reach each other) -> `elementary` (norms, convolution, rotation, matrix product) -> `attention`, `exchange`
(expert transports), `moe` -> `loss`, `ready` (parameters at use) -> `transformer` (forward) -> `decode` (forward with a
cache), `program` (the seam to training). `families` (named configs with their published runs) and `count` stand beside
and need no JAX.

Shape legend, used in every annotation of this room:

    B  sequences in a batch      S  positions in a sequence     T  tokens = B * S           V  vocabulary
    D  width                     L  layers                      N  query heads              K  stored kv heads
    H  head width                E  routed experts              A  experts per token        F  routed expert width
    Z  latent width              J  shared experts              G  shared expert width      M  dense MLP width
    R  rank of a gated norm      C  channels of a convolution   I  taps of a convolution    P  positions in a cache

Matrices act on the right: `x @ w`, a matrix is [inputs, outputs]. Losses and entropies are in nats.
"""
