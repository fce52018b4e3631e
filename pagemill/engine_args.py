"""Arguments of the offline engines, and the settings of scheduler and worker that they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError

# Offline, the caller's own list bounds what waits.
_UNBOUNDED = 1 << 40


@dataclass(slots=True, frozen=True)
class EngineArgs:
    """What `LLM` and `AsyncLLMEngine` are built from.

    Attributes:
        model: directory, .gguf file or hub id; empty is the demo model.
        tokenizer: directory, tokenizer.json or .gguf; empty is the model's own.
        chat_template: Jinja file or text; empty is the model's own.
        dtype: of weights and activations; auto follows the model's config.
        device: auto takes CUDA where it is present.
        max_model_len: longest sequence in tokens; None is the model's own.
        block_size: tokens per KV block: 8, 16, 32 or 64.
        num_blocks: KV blocks; None is chosen from memory.
        kv_cache_dtype: auto is that of the weights; fp8 (as fp8_e4m3) or fp8_e5m2 hold twice as many tokens.
        kv_cache_gib: KV memory where num_blocks is None; None is 1 GiB on a CPU and on a GPU what is left of
            gpu_memory_utilization.
        gpu_memory_utilization: share of a GPU's memory that may be in use, by all processes; None is 0.90.
        max_num_seqs: most sequences running at once; None is 256 on a CPU, 1024 on a GPU (256 with less than 70 GiB).
        max_num_batched_tokens: most tokens in one step; None is 512 on a CPU, 8192 on a GPU (2048 with less than 70
            GiB).
        enable_prefix_caching: share KV of common prefixes.
        enforce_eager: no CUDA graphs.
        tensor_parallel_size: GPUs that share one model; 1 is supported.
        num_threads: CPU threads; None is chosen from the cores.
        load_format: kind of weight files.
        download_dir: hub cache directory; None is the hub client's own.
        seed: seed of requests without one of their own, mixed with their number; None draws one per request.
        max_queued_requests: requests that may wait in an AsyncLLMEngine; more are refused.
    """

    model: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    num_threads: int | None = None
    load_format: str = "auto"
    download_dir: str | None = None
    seed: int | None = None
    max_queued_requests: int = 1024

    def without_queue_bound(self) -> EngineArgs:
        """The same for a caller that submits a list at once."""
        return replace(self, max_queued_requests=_UNBOUNDED)

    def worker_settings(self, model_path: str) -> WorkerSettings:
        """Settings of the model runner.

        Raises:
            ConfigError: an argument is of the wrong kind or out of range; `field` and the message name it.
        """
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}, only 1 is supported",
                field="tensor_parallel_size",
            )
        names = WorkerSettings.model_fields.keys() & set(self.__slots__)
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        # Requests carry seeds of their own; the worker's is for dummy weights.
        values |= {"model": model_path, "seed": 0}
        try:
            return WorkerSettings(**values)
        except ValidationError as err:
            problem = err.errors()[0]
            message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
            if not problem["loc"]:
                raise ConfigError(message, field=message.split()[0]) from None
            name = str(problem["loc"][0])
            raise ConfigError(f"{name} is {values[name]!r}: {message}", field=name) from None
