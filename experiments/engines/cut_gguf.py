"""A draft model for llama.cpp: the first layers of a GGUF model, with its vocabulary, embeddings and head.

    python experiments/engines/cut_gguf.py models/SmolLM2-135M-Instruct.Q4_1.gguf --layers 4 --out models/draft-4.gguf

It guesses badly, as an untrained draft model does; under synthetic acceptance only what it costs matters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def cut(source: Path, layers: int, out: Path) -> None:
    """Write the first ``layers`` layers of ``source`` to ``out``."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    blocks = f"{architecture}.block_count"
    if not 1 <= layers <= reader.fields[blocks].contents():
        raise SystemExit(f"--layers: expected 1 to {reader.fields[blocks].contents()}, as {source} has, got {layers}")
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # written by the writer itself
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, layers if name == blocks else field.contents(), kind, inner)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    cut(asked.source, asked.layers, asked.out)
    print(asked.out)
