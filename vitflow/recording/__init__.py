"""Record one forward pass of an unmodified model; hooks on running models are defined only in this package.

A model can be recorded if

1. no index, mask, branch or loop between its pixels and its last block depends on the values of the image;
2. in each block a token is computed from itself, from recorded attention, and from convolutions or pooling of its
   neighbours;
3. each attention reads the tokens in order, or in windows that an index can follow;
4. the patches of the first grid are at their pixels;
5. the head reads outputs of blocks.

Tokens that are replaced by constants are cut. Everything else is refused by a sentence that names the module and the
clause. By clause 1, what holds on noise holds for every image: the contract is checked once per state of the model and
input size, and docs/inside.md says how, and what is not noticed. The files, in the order of a pass:

- `recorder` opens a recording; `isolation` restores the model; `experiment` runs it on noise.
- `interception`, `attending`, `attention_kinds`: attention in torch functions; `listening`, `layers`, `projections`:
  the matrices of each layer; `parallel`: modules that are one layer.
- `layer_tokens`: tokens and windows of each layer (clause 3).
- `certificate`: clauses 1 to 3, by `value_dependence` and by `followed_tokens`: `permuted_tokens`, or `coded_tokens`
  with `token_codes` and `receptive_reach`; `without_attention`.
- `places`, `receptive_fields`: pixels of the tokens (clause 4).
- `head`, `readout`: tokens that the output reads (clause 5); `trace`: the result; `backward`: its gradients.
- `frozen`: passes with frozen nonlinearities.
"""
