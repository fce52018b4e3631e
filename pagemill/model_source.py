"""From what a person writes as MODEL to files on disk and a config in Hugging Face's form. Never imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagemill.demo_model import DEMO_MODEL_NAME, demo_model_path
from pagemill.errors import ModelLoadError
from pagemill.gguf_file import read_gguf_head

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
_TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]

# GGUF names of architectures and their Hugging Face class. Others pass through by name, for the worker to refuse.
_GGUF_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of one model.

    Attributes:
        kind: "hf" is a directory with config.json, "gguf" is one file.
        path: the directory or the file.
        name: default name towards clients.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    name: str


def resolve_model(
    model: str, *, files: Literal["all", "tokenizer"] = "all", download_dir: str | None = None
) -> ModelSource:
    """Find a model, downloading it from the hub where `model` is a hub id that is not cached.

    Args:
        model: "" for the demo model, a directory, a .gguf file, or a hub id.
        files: "tokenizer" leaves the weights of a hub model out.
        download_dir: hub cache directory; None is the hub client's own.

    Raises:
        ModelLoadError: nothing there; the message names the model and what to do.
    """
    if not model:
        return ModelSource("gguf", demo_model_path(), DEMO_MODEL_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_directory(path.resolve(), path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(
                f"model {model!r} is a file but not .gguf; name its directory if it holds config.json and weights",
                field="model",
            )
        return ModelSource("gguf", path.resolve(), _QUANTIZATION_SUFFIX.sub("", path.stem) or path.stem)
    if path.suffix.lower() == ".gguf" or model[0] in "./~" or not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"model {model!r} does not exist: no such directory or .gguf file", field="model")
    return _from_directory(_download(model, files, download_dir), model)


def _from_directory(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("hf", path, name)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelSource("gguf", gguf_files[0], name)
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelLoadError(f"model {name!r} has several .gguf files, name one: {names}", field="model")
    raise ModelLoadError(f"model directory {str(path)!r} has neither config.json nor a .gguf file", field="model")


def _download(model: str, files: Literal["all", "tokenizer"], download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(model, allow_patterns=patterns, cache_dir=download_dir))

    try:
        path = fetch(_TOKENIZER_PATTERNS)
        if files == "tokenizer":
            return path
        return _fetch_weights(path, fetch)
    except ModelLoadError:
        raise
    except Exception as err:  # the hub client raises its own, httpx's and OS errors alike
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelLoadError(
            f"model {model!r} is no local path and could not be fetched from the hub: {reason}; "
            "check the id and the network, or name a local directory or .gguf file",
            field="model",
        ) from err


def _fetch_weights(path: Path, fetch: Callable[[list[str]], Path]) -> Path:
    """safetensors, else PyTorch files, else GGUF: never two copies of the same weights."""
    for suffix in ("safetensors", "bin", "gguf"):
        path = fetch([f"*.{suffix}"])
        if any(path.glob(f"*.{suffix}")):
            return path
    raise ModelLoadError(f"the hub repository in {str(path)!r} has no weights", field="model")


def load_config(source: ModelSource) -> dict[str, Any]:
    """The model's configuration with the keys of Hugging Face's config.json, built from metadata where it is a GGUF.

    Raises:
        ModelLoadError: missing, unreadable, or without a key that every model has.
    """
    if source.kind == "gguf":
        return _config_from_gguf(source.path)
    return _read_json(source.path / "config.json")


def eos_token_ids(source: ModelSource, config: dict[str, Any] | None = None) -> list[int]:
    """Ids that end a sequence: generation_config.json's where it has some, else the config's. Sorted, maybe empty.

    Args:
        source: the model.
        config: `load_config(source)` where the caller has it already.
    """
    found: Any = None
    generation_config = source.path / "generation_config.json"
    if source.kind == "hf" and generation_config.is_file():
        found = _read_json(generation_config).get("eos_token_id")
    if found is None:
        found = (config if config is not None else load_config(source)).get("eos_token_id")
    if found is None:
        return []
    return sorted({int(token_id) for token_id in (found if isinstance(found, list) else [found])})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {err}", field="model") from err
    if not isinstance(value, dict):
        raise ModelLoadError(f"{str(path)!r} does not hold a JSON object", field="model")
    return value


def _config_from_gguf(path: Path) -> dict[str, Any]:
    head = read_gguf_head(path)
    metadata, tensors = head.metadata, head.tensors
    architecture = _required(metadata, "general.architecture", path)

    def need(key: str) -> Any:
        return _required(metadata, f"{architecture}.{key}", path)

    num_heads = int(need("attention.head_count"))
    hidden_size = int(need("embedding_length"))
    head_dim = int(metadata.get(f"{architecture}.attention.key_length", hidden_size // num_heads))
    model_type, class_name = _GGUF_ARCHITECTURES.get(architecture, (architecture, architecture))
    rope = _gguf_rope(architecture, metadata, path)
    eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    eos_ids = sorted({int(token_id) for token_id in eos if token_id is not None})
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{str(path)!r} has no tensor 'token_embd.weight'", field="model")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.get(f"{architecture}.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon")),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _required(metadata: dict[str, Any], key: str, path: Path) -> Any:
    if key not in metadata:
        raise ModelLoadError(f"{str(path)!r} has no metadata {key!r}: is it a language model?", field="model")
    return metadata[key]


def _gguf_rope(architecture: str, metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """rope_parameters; scalings that cannot be expressed are refused rather than computed wrongly.

    Llama 3's scaling is a tensor of the file, rope_freqs.weight, which the worker reads with the weights.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
    }
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0))}
    elif scaling != "none":
        raise ModelLoadError(
            f"{str(path)!r} scales rotary positions by {scaling!r}: supported from a Hugging Face directory only",
            field="model",
        )
    return rope
