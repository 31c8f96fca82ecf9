"""Real drafters against a real target: load, train, record. The part of specsim that needs torch.

``pip install 'specsim[drafters]'`` brings what it needs.
"""

from importlib.util import find_spec

from specsim.types import SpecsimError, to_install

NEEDS = ("torch", "transformers", "safetensors", "gguf", "accelerate")


def check_installed() -> None:
    """Raise SpecsimError, naming what to install, unless torch and its companions are there.

    Called before the modules of this package are imported, which import torch at their top.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise SpecsimError(f"drafters need {', '.join(missing)}: {to_install('drafters')}")
