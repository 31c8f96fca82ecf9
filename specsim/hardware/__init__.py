"""Hardware profiles: what a step costs, as tables, kernels or a roofline; one JSON file each."""

from specsim.hardware.layered import Attention, Curve, Layered, Skew
from specsim.hardware.profile import (
    SCHEMA,
    Profile,
    Provenance,
    StepCost,
    load_profile,
    save_profile,
    sps,
    step_cost,
)
from specsim.hardware.shape import Shape
from specsim.hardware.tables import Additive, DraftCost, Table1D, Table2D

__all__ = [
    "SCHEMA", "Additive", "Attention", "Curve", "DraftCost", "Layered", "Profile", "Provenance", "Shape", "Skew",
    "StepCost", "Table1D", "Table2D", "load_profile", "save_profile", "sps", "step_cost",
]  # fmt: skip
