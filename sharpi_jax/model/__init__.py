"""The model as pure functions `f(params, cfg, inputs, state) -> (outputs, state)`.

Shape letters, the same in every signature and einsum of the package:
  B rows, T window or prompt positions, S cache slots, D model width, V vocabulary, K draft length, W = K + 1 window
  H heads (query heads of attention, value heads of Gated DeltaNet), N key heads, G = H / N heads per key head
  E head dimension, R rotated dimensions of a head, C convolution channels, J convolution taps
  F feed-forward width, X experts

Mathematics: Qwen3.5 / Qwen3.6 (Gated DeltaNet: Yang et al. 2024, arXiv 2412.06464), as llama.cpp and transformers
compute it; the numbers are held to both by tests/test_model.py.
"""
