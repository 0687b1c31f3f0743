"""A bundle on disk: the plan with its proof, the artifacts, the golden set and the user's code.

minilm.tp/
  proof.json           types.Proof
  golden.safetensors   the golden set
  weights.safetensors  the module's weights, where it has any
  code/                the user's own modules, or the saved model
  artifacts/           one folder for each runtime and precision that may be served
  SHA256SUMS           of every other file; `sha256sum -c SHA256SUMS` checks it too
"""

from torchproof.bundle.read import Bundle, open_bundle
from torchproof.bundle.replay import load_choice, open_source, replay
from torchproof.bundle.write import write_bundle

__all__ = ["Bundle", "load_choice", "open_bundle", "open_source", "replay", "write_bundle"]
