"""The shape of a dense decoder to measure: from a preset, a config.json or flags."""

from __future__ import annotations

from pydantic import ValidationError

from specsim.files import first_error
from specsim.hardware.model_shape import DENSE_PRESETS, ModelShape, find_model
from specsim.types import SpecsimError


def find_shape(model: str | None, **given: int | bool | None) -> ModelShape:
    """The shape of ``model``: a preset, a config.json or a folder with one; None: of the ``given`` fields alone.

    Fields that are given (not None) replace the model's. Raises SpecsimError for an unknown model, one that is
    no dense decoder like Llama or Qwen3, a missing field or an impossible shape.
    """
    fields: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if model is None:
        needed = {name for name, field in ModelShape.model_fields.items() if field.is_required()} - {"name"}
        if missing := sorted(needed - set(fields)):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise SpecsimError(
                f"--model: expected a preset ({', '.join(DENSE_PRESETS)}), a config.json, or also {flags}"
            )
        fields["name"] = "custom"
    else:
        shape = find_model(model, presets=DENSE_PRESETS)
        if shape.moe_layers:
            raise SpecsimError(f"--model: {model}: a mixture of experts cannot be measured, expected a dense model")
        fields = dict(shape) | fields | ({"name": f"{shape.name}-changed"} if fields else {})
    try:
        shape = ModelShape.model_validate(fields)
    except ValidationError as error:
        raise SpecsimError(f"model {fields['name']}: {first_error(error)}") from error
    if shape.head_dim % 2:
        raise SpecsimError(f"model {shape.name}: head_dim: expected an even number, got {shape.head_dim}")
    return shape
