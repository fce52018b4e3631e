"""From a request to prompt token ids: chat rendering, tokenization, the token cache, and the context-length rule."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from opentelemetry.context import Context

from pagemill.errors import ContextLengthError, InvalidRequestError
from pagemill.sampling_params import SamplingParams
from pagemill.telemetry import tracer
from router.chat import ChatRenderer
from router.generation import GenerationRequest
from router.prompt_cache import PromptCache, tokens_key
from router.tokenizer import TokenizerPool

_tracer = tracer("router.prompts")


@dataclass(slots=True, frozen=True)
class ContextLimits:
    """What bounds a sequence. All in tokens."""

    max_model_len: int
    kv_capacity_tokens: int = 0  # 0 is unknown

    @property
    def longest_sequence(self) -> int:
        return min(self.max_model_len, self.kv_capacity_tokens or self.max_model_len)

    def resolve(self, request: GenerationRequest, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The request's sampling with a max_tokens that fits.

        A max_tokens that the client named must fit; an absent one is the rest of the context for a conversation, and
        the default or less for a prompt.

        Raises:
            ContextLengthError: the message has both numbers.
        """
        longest = self.longest_sequence
        room = longest - num_prompt_tokens
        if room < max(1, sampling.min_tokens):
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output: the context length is "
                f"{longest} tokens",
                field=prompt_field(request),
            )
        if request.max_tokens_absent:
            wanted = room if request.messages is not None else max(sampling.max_tokens, sampling.min_tokens)
            return replace(sampling, max_tokens=min(wanted, room))
        if sampling.max_tokens > room:
            raise ContextLengthError(
                f"the context length is {longest} tokens, but {num_prompt_tokens} prompt tokens and max_tokens "
                f"{sampling.max_tokens} are {num_prompt_tokens + sampling.max_tokens}",
                field="max_tokens",
            )
        return sampling


def prompt_field(request: GenerationRequest) -> str:
    """The request field that the prompt came in."""
    return "messages" if request.messages is not None else "prompt"


def scheduler_salt(request: GenerationRequest) -> bytes:
    """Bytes that keep prefix-cache entries of tenants and of client salts apart; empty where there is neither."""
    if not request.tenant and not request.cache_salt:
        return b""
    tenant = request.tenant.encode("utf-8", "surrogatepass")
    salt = request.cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(len(tenant).to_bytes(8, "little") + tenant + salt, digest_size=16).digest()


class PromptReader:
    """Token ids of requests.

    Args:
        tokenizers: the model's tokenizer with its threads.
        renderer: the model's chat templates.
        cache: for token ids.
        vocab_size: number of token ids of the model.
    """

    def __init__(self, tokenizers: TokenizerPool, renderer: ChatRenderer, cache: PromptCache, vocab_size: int) -> None:
        self._tokenizers = tokenizers
        self._renderer = renderer
        self._cache = cache
        self._vocab_size = vocab_size

    async def token_ids(
        self, request: GenerationRequest, limits: ContextLimits | None, parent: Context
    ) -> tuple[list[int], bool]:
        """Prompt ids of a request, and whether the cache had them.

        Args:
            request: any request.
            limits: refuse texts that can not fit before tokenizing them; None tokenizes everything.
            parent: trace context of the spans.

        Raises:
            InvalidRequestError: no prompt, more than one, an empty one, or one that the template refuses.
            ContextLengthError: the text is longer than any text that fits.
        """
        given = [v for v in (request.prompt_text, request.prompt_token_ids, request.messages) if v is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "exactly one of a text prompt, token ids and messages is needed", field=prompt_field(request)
            )
        if request.prompt_token_ids is not None:
            return self._checked_ids(request.prompt_token_ids), False
        if request.messages is not None:
            with _tracer.start_as_current_span("router.render", context=parent):
                text = self._renderer.render(
                    request.messages,
                    tools=request.tools,
                    add_generation_prompt=request.add_generation_prompt,
                    template_kwargs=request.chat_template_kwargs,
                )
        else:
            text = request.prompt_text or ""
        if limits is not None:
            self._refuse_hopeless(text, request, limits)
        # The template writes the special tokens itself: adding them again would double the first.
        ids, from_cache = await self._tokenize(text, add_special_tokens=request.messages is None, parent=parent)
        if not ids:
            raise InvalidRequestError("the prompt is empty", field=prompt_field(request))
        return ids, from_cache

    def _checked_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        for position, token_id in enumerate(token_ids):
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt token {position} is {token_id!r}, which is no id in a vocabulary of {self._vocab_size}",
                    field="prompt",
                )
        return list(token_ids)

    def _refuse_hopeless(self, text: str, request: GenerationRequest, limits: ContextLimits) -> None:
        at_least = self._tokenizers.tokenizer.min_token_count(text)
        if at_least > limits.longest_sequence:
            raise ContextLengthError(
                f"the prompt has at least {at_least} tokens, more than the context length of "
                f"{limits.longest_sequence} tokens",
                field=prompt_field(request),
            )

    async def _tokenize(self, text: str, *, add_special_tokens: bool, parent: Context) -> tuple[list[int], bool]:
        key = tokens_key(self._tokenizers.tokenizer.fingerprint, text, add_special_tokens=add_special_tokens)
        with _tracer.start_as_current_span("router.cache", context=parent) as span:
            cached = await self._cache.get_tokens(key)
            span.set_attribute("pagemill.cache.kind", "tokens")
            span.set_attribute("pagemill.cache.hit", cached is not None)
        if cached is not None and all(token_id < self._vocab_size for token_id in cached):
            return cached, True
        with _tracer.start_as_current_span("router.tokenize", context=parent) as span:
            ids = await self._tokenizers.encode(text, add_special_tokens=add_special_tokens)
            span.set_attribute("pagemill.num_tokens", len(ids))
        self._cache.put_tokens(key, ids)
        return ids, False
