"""Hardware profiles: what a step costs, as tables, kernels or a roofline; one JSON file each."""

from specsim.hardware.analytic import roofline_profile
from specsim.hardware.devices import DEVICES, Device, find_device
from specsim.hardware.layered import Attention, Curve, Layered, Skew
from specsim.hardware.model_shape import ModelShape, find_model
from specsim.hardware.profile import (
    SCHEMA,
    Profile,
    Provenance,
    StepCost,
    analytic_caveat,
    load_profile,
    save_profile,
    sps,
    step_cost,
)
from specsim.hardware.roofline import Roofline
from specsim.hardware.shape import Prices, Shape
from specsim.hardware.tables import Additive, DraftCost, Table1D, Table2D

__all__ = [
    "DEVICES", "SCHEMA", "Additive", "Attention", "Curve", "Device", "DraftCost", "Layered", "ModelShape", "Prices",
    "Profile", "Provenance", "Roofline", "Shape", "Skew", "StepCost", "Table1D", "Table2D", "analytic_caveat",
    "find_device", "find_model", "load_profile", "roofline_profile", "save_profile", "sps", "step_cost",
]  # fmt: skip
