"""Tokenizer of a Hugging Face directory: tokenizer.json, else SentencePiece's tokenizer.model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from pagemill.errors import ModelLoadError
from router.tokenizer import TokenizerParts
from router.tokenizer_sentencepiece import read_sentencepiece

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_hf(path: Path) -> TokenizerParts:
    """Read a directory, or the directory of a tokenizer.json.

    Raises:
        ModelLoadError: no tokenizer there, or one of its files is broken.
    """
    directory = path if path.is_dir() else path.parent
    config = _read_json(directory / "tokenizer_config.json")
    special_map = _read_json(directory / "special_tokens_map.json")
    named = {**_named_tokens(special_map), **_named_tokens(config)}
    backend, named = _read_backend(directory, path, config, named)
    _add_missing_tokens(backend, config, [*named.values(), *_extra_special_tokens(special_map, config)])
    return TokenizerParts(backend, named, _eos_ids(directory, backend, named), _chat_templates(directory, config))


def _read_backend(
    directory: Path, path: Path, config: dict[str, Any], named: dict[str, str]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    json_file = path if path.is_file() and path.suffix == ".json" else directory / "tokenizer.json"
    if json_file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(json_file)), named
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise ModelLoadError(f"tokenizer file {json_file} cannot be read: {error}", field="tokenizer") from error
    model_file = path if path.is_file() else directory / "tokenizer.model"
    if model_file.is_file():
        parts = read_sentencepiece(model_file)
        named = {**parts.special_tokens, **named}
        # A .model file does not say which tokens go around a text; a tokenizer.json does, and is then followed.
        bos = named.get("bos_token") if config.get("add_bos_token", True) else None
        set_bos_eos(parts.backend, bos, named.get("eos_token") if config.get("add_eos_token") else None)
        return parts.backend, named
    raise ModelLoadError(
        f"no tokenizer in {directory}: neither tokenizer.json nor tokenizer.model is there", field="tokenizer"
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}", field="tokenizer") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object", field="tokenizer")
    return content


def _token_name(value: Any) -> str | None:
    """A token's name, which files give as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: token for name in _NAMED if (token := _token_name(config.get(name)))}


def _extra_special_tokens(*configs: dict[str, Any]) -> Iterable[str]:
    for config in configs:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = config.get(key) or []
            for entry in value.values() if isinstance(value, dict) else value:
                if token := _token_name(entry):
                    yield token


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: list[str]) -> None:
    """Tokens that tokenizer_config.json adds to the tokenizer's own, and special tokens not marked so."""
    known = backend.get_added_tokens_decoder()
    entries = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        name = _token_name(entry)
        if name is None or int(token_id) in known:
            continue
        flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        is_special = flags.pop("special", False)
        token = tokenizers.AddedToken(name, special=is_special, **flags)
        (backend.add_special_tokens if is_special else backend.add_tokens)([token])
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # A name without an id would get one beyond the model's embeddings.
    unmarked = [t for t in dict.fromkeys(special) if t not in marked and backend.token_to_id(t) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in unmarked])


def set_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the tokenizer put these tokens around each text; None is nothing."""
    tokens = [(t, backend.token_to_id(t)) for t in dict.fromkeys((bos, eos)) if t is not None]
    usable = {t for t, token_id in tokens if token_id is not None}
    single = " ".join([*([bos] if bos in usable and bos else []), "$A", *([eos] if eos in usable and eos else [])])
    backend.post_processor = TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(t, i) for t, i in tokens if i is not None],
    )


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer, named: dict[str, str]) -> list[int]:
    """All end-of-sequence ids: generation_config.json's and config.json's, and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids += [int(i) for i in (value if isinstance(value, list) else [value])]
            break
    if (eos := named.get("eos_token")) is not None and (token_id := backend.token_to_id(eos)) is not None:
        ids.append(int(token_id))
    return ids


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates.update({str(entry["name"]): str(entry["template"]) for entry in value})
    in_json = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
