"""Directories without weights, for `--load-format dummy`: a config.json of a known shape, and a tokenizer of its size.

The tokenizer is a real byte-level BPE tokenizer over letters: every id of it has text, so that detokenization costs
what it costs with a tokenizer that was learned.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
# hidden, intermediate, layers, query heads, KV heads, vocabulary, longest sequence, base of the rotary embedding
_SIZES = {
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, 8192, 500000.0),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096, 10000.0),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, 4096, 10000.0),
    "mistral-7b": (4096, 14336, 32, 32, 8, 32000, 32768, 10000.0),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, 8192, 100000.0),
    "tiny": (128, 352, 2, 2, 1, 1024, 2048, 10000.0),
}
SHAPES = tuple(_SIZES)
_SPECIAL = ("<unk>", "<s>", "</s>")
_SMALLEST_VOCABULARY = len(_SPECIAL) + 256


def shape_config(shape: str, *, num_layers: int | None = None) -> dict[str, Any]:
    """config.json of a shape.

    Raises:
        ConfigError: an unknown shape; the message lists those that there are.
    """
    if shape not in _SIZES:
        raise ConfigError(f"--shape {shape}: there is no such shape; there are {', '.join(SHAPES)}", field="shape")
    hidden, intermediate, layers, heads, kv_heads, vocabulary, longest, theta = _SIZES[shape]
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers or layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def write_model(directory: Path, shape: str, *, num_layers: int | None = None) -> None:
    """config.json and tokenizer.json of a shape, into a directory that is made where it is missing."""
    config = shape_config(shape, num_layers=num_layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory / "tokenizer.json", int(config["vocab_size"]))


def write_tokenizer(file: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of `vocab_size` ids: <unk>, <s>, </s>, the 256 bytes, then runs of letters.

    Raises:
        ConfigError: the vocabulary has no room for the bytes.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small for a byte tokenizer, it needs {_SMALLEST_VOCABULARY}; "
            "name a tokenizer with --tokenizer",
            field="tokenizer",
        )
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*_SPECIAL, *alphabet]
    merges = list(itertools.islice(_merges(), vocab_size - len(names)))
    names += [left + right for left, right in merges]
    model = models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.save(str(file), pretty=False)


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs that make all runs of two letters, then of three, and so on; a word may begin with the byte of a space."""
    first = ["Ġ", *string.ascii_lowercase]
    shorter = first
    while True:
        longer = []
        for left, right in itertools.product(shorter, string.ascii_lowercase):
            yield left, right
            longer.append(left + right)
        shorter = longer
