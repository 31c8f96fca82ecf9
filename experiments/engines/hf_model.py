"""A Hugging Face folder of a GGUF model, or of its first layers alone, for engines that read no GGUF (vLLM).

    python experiments/engines/hf_model.py --from models --out models/hf
    python experiments/engines/hf_model.py --from models --out models/hf-8 --layers 8

The second is a draft model: the same vocabulary and embeddings, fewer layers. It guesses badly and costs little, as
an untrained draft model does; what it is good for is that its acceptance is real and its cost is known.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specsim.drafters.target import load_target


def save(source: str, out: Path, layers: int | None) -> None:
    """Write the model at ``source`` to the folder ``out`` in bfloat16."""
    target = load_target(source)
    model = target.model
    if layers is not None:
        model.base_model.layers = model.base_model.layers[:layers]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    # Its weights were unpacked on loading: nothing of the file's quantization is left.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._attn_implementation = "eager"
    model.to(torch.bfloat16).save_pretrained(out)
    target.tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", default="models", help="what load_target reads (default: models)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="of the first layers alone")
    asked = parser.parse_args()
    save(asked.source, asked.out, asked.layers)
    print(asked.out)
