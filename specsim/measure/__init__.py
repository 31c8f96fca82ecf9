"""Step times of a model shape on this machine: the benchmark behind ``specsim measure``. Needs torch.

A lean decoder with random weights runs real verification batches (sequences of different lengths, each with
an anchor and its draft tokens) and what comes out is a hardware profile, a log of every point and a picture.
"""

from importlib.util import find_spec

from specsim.types import SpecsimError, to_install


def check_installed() -> None:
    """Raise SpecsimError, naming what to install, unless torch is there.

    Called before the modules of this package are imported, which import torch at their top.
    """
    if find_spec("torch") is None:
        raise SpecsimError(f"measuring needs torch: {to_install('drafters')}")
