"""The demo model as a Hugging Face directory in bfloat16, for engines that read no GGUF, and as GGUF in bfloat16.

python benchmarks/peers/convert.py            # directory
python benchmarks/peers/convert.py FILE.gguf  # GGUF in bfloat16
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from pagemill.demo_model import demo_model_path


def ensure_hf_directory() -> Path:
    """Converts on first use, beside the GGUF file; returns the directory."""
    source = demo_model_path()
    target = source.parent / (source.stem + "-bf16")
    if not (target / "model.safetensors").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # transformers does not save a model that it read from GGUF: its weights go into a plain one.
        config = copy.deepcopy(loaded.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in loaded.state_dict().items()})
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)
    return target


def write_bf16_gguf(target: Path) -> None:
    """The demo model with every matrix in bfloat16, dequantized from the same values."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(demo_model_path())
    writer = GGUFWriter(target, "llama")
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == "general.file_type":
            writer.add_file_type(LlamaFileType.MOSTLY_BF16)
            continue
        kind = entry.types[0]
        writer.add_key_value(
            key, entry.contents(), kind, sub_type=entry.types[-1] if kind == GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(d) for d in reversed(tensor.shape)])
        if values.ndim == 2:
            packed = quantize(values.astype(np.float32), GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_bf16_gguf(Path(sys.argv[1]))
    else:
        print(ensure_hf_directory())
