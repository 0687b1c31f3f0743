"""A bundle on disk: the plan with its proof, the artifacts, the golden set and the user's code.

minilm.tp/
  proof.json           types.Proof
  golden.safetensors   the golden set
  weights.safetensors  the module's weights, where it has any
  code/                the user's own modules, or the saved model
  artifacts/           one folder for each runtime and precision that may be served
  SHA256SUMS           of every other file; `sha256sum -c SHA256SUMS` checks it too

Exports nothing: ``bundle.read`` stays free of torch, so that ``serve`` reads the plan before torch is imported.
"""
