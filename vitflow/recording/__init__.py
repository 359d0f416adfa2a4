"""Record one forward pass of an unmodified model; hooks on running models are defined only in this package.

`recorder` opens a recording, `interception` and `listening` collect attention while the model runs, and `places.locate`
finishes the `Trace`. What decides the meaning of a map is determined as follows; docs/inside.md has the same rows.

- Applied attention (`interception`): softmaxes and products are observed in the pass. Without any: NoAttentionError.
- Layers (`parallel`): one run on one image per input size, in which tensors are marked with the attention that they are
  computed from. Modules side by side on the same tokens are one layer; others side by side: rollout is refused.
- Positions of tokens (`layer_tokens`): the model's layout, or, if layers differ, one run on noise per input size, in
  which patch indices follow the tokens. Unknown: rollout is refused.
- The contract (`certificate`, `value_dependence`, `followed_tokens`): runs on noise per model and input size, with
  attention replaced by the identity. Tokens chosen by values, mixed or reordered: refused by clause. Tokens that are
  replaced between blocks are masked. A model that rejects noise is not checked.
- Pixels of tokens (`places`, `receptive_fields`): gradients on noise, one run per input size. Misplaced tokens: rollout
  is refused. Not measurable: cells divide the image evenly.
- Tokens that the output reads (`head`, `readout`): gradients in the pass, or in a repetition of it. Without a
  gradient: the declared pooling, "declared, not verified", or a refusal.
- Output projection (`projections`): each call is compared with the stored weight by one product with a vector; if they
  differ, its map is measured on unit vectors. Not linear: no value weighting, with a note, until the model changes.
"""
