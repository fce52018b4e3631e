"""All settings of all services: one model per service, one place for names, types, defaults and meaning.

Values come from, later ones winning: the defaults here, a YAML file (sections `router`, `scheduler`, `worker`, `serve`,
and `common` for what several share), the environment (`PAGEMILL_<SECTION>_<NAME>`, and `PAGEMILL_<NAME>` for common
ones), the command line. An unknown key anywhere is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pagemill.api_keys import ApiKeys
from pagemill.errors import ConfigError

BLOCK_SIZES = (8, 16, 32, 64)
# Counts of tokens, sequences and blocks that kernels and protobuf messages hold.
MAX_COUNT = (1 << 31) - 1
DEFAULT_CPU_KV_CACHE_GIB = 1.0
DEFAULT_GPU_MEMORY_UTILIZATION = 0.90


def _known_block_size(block_size: int) -> int:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"should be one of {', '.join(map(str, BLOCK_SIZES))}")
    return block_size


def _joined_keys(value: Any) -> Any:
    """Keys as one text, which a file may also write as a list."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(entry, str) for entry in entries):
        raise ValueError("should be text such as KEY or TENANT=KEY,TENANT=KEY, or a list of such; quote a number")
    return ",".join(entries)


def _usable_keys(keys: str) -> str:
    try:
        ApiKeys(keys)
    except ConfigError as err:
        raise ValueError(err.message.removeprefix("api_key: ")) from None
    return keys


Port = Annotated[int, Field(ge=0, le=65535)]
BlockSize = Annotated[int, AfterValidator(_known_block_size)]
ApiKeyText = Annotated[str, BeforeValidator(_joined_keys), AfterValidator(_usable_keys)]


class CommonSettings(BaseModel):
    """What every service has."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="least severe level logged")
    log_format: Literal["console", "json"] = Field("console", description="readable lines or one JSON object per line")
    otlp_endpoint: str = Field(
        "", description="OTLP gRPC endpoint for traces, such as http://127.0.0.1:4317; empty: off"
    )
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="share of new traces that are recorded")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port")
    metrics_port: Port | None = Field(None, description="Prometheus port; unset: none (the router also has /metrics)")
    metrics_vllm_names: bool = Field(False, description="export metrics also under the names that vLLM gives them")
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running streams get to finish after SIGTERM")


class RouterSettings(CommonSettings):
    """The stateless front: HTTP, gRPC, tokenizer, prompt cache, routing."""

    model: str = Field(
        "", description="directory, .gguf file or hub id whose tokenizer and config are used; empty: demo"
    )
    served_model_name: list[str] = Field(default_factory=list, description="names clients may use; default: from model")
    http_host: str = Field("127.0.0.1", description="address of the OpenAI HTTP API")
    http_port: Port = Field(8000, description="port of the OpenAI HTTP API; 0 picks one")
    grpc_host: str = Field("127.0.0.1", description="address of the gRPC API")
    grpc_port: Port = Field(50051, description="port of the gRPC API; 0 picks one")
    scheduler: list[str] = Field(default_factory=lambda: ["127.0.0.1:50052"], description="scheduler addresses")
    tokenizer: str = Field("", description="directory or tokenizer.json; empty: the model's own")
    chat_template: str = Field("", description="Jinja file or text; empty: the model's own")
    api_key: ApiKeyText = Field(
        "",
        description="keys that clients must send: KEY or TENANT=KEY, comma-separated (in YAML also a list); empty: any",
    )
    max_request_bytes: int = Field(16 << 20, ge=1024, description="largest request body")
    max_inflight_requests: int = Field(4096, ge=1, description="requests at once; more are refused with 429")
    request_timeout_s: float = Field(600.0, gt=0, description="longest time of one request")
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize long prompts")
    redis_url: str = Field("", description="redis:// or unix:// address of the prompt cache; empty: no cache")
    redis_timeout_ms: float = Field(20.0, gt=0, description="longest wait for Redis before a miss")
    cache_tokens: bool = Field(True, description="cache token ids of rendered prompts")
    cache_tokens_ttl_s: int = Field(3600, ge=1, description="life of a cached tokenization")
    cache_responses: bool = Field(True, description="cache responses that are deterministic by their parameters")
    cache_responses_ttl_s: int = Field(600, ge=1, description="life of a cached response")
    cache_max_entry_bytes: int = Field(1 << 20, ge=1024, description="larger entries are not cached")


class SchedulerSettings(CommonSettings):
    """Block tables, prefix cache, continuous batching."""

    host: str = Field("127.0.0.1", description="address that routers and workers dial")
    port: Port = Field(50052, description="port that routers and workers dial; 0 picks one")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="most tokens in one step; unset: as many as the worker holds"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="most sequences running at once; unset: as many as the worker holds"
    )
    max_queued_requests: int = Field(1024, ge=1, description="requests waiting; more are refused")
    max_queued_tokens: int = Field(4 << 20, ge=1, description="prompt tokens waiting; more are refused")
    enable_prefix_caching: bool = Field(True, description="share KV of common prefixes")
    check_integrity: bool = Field(False, description="verify block accounting whenever idle")
    worker_timeout_s: float = Field(30.0, gt=0, description="a step without result for longer loses its worker")


class WorkerSettings(CommonSettings):
    """Weights, KV cache, kernels, sampler."""

    model: str = Field("", description="directory, .gguf file or hub id; empty: demo model")
    scheduler: str = Field("127.0.0.1:50052", description="scheduler to attach to")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to run; auto takes CUDA if present")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half"] = Field("auto", description="weights and KV")
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy", "hf"] = Field("auto", description="weight files")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="KV cache: auto as weights, fp8 (as fp8_e4m3) in 8 bits"
    )
    block_size: BlockSize = Field(16, description="tokens per KV block: 8, 16, 32 or 64")
    num_blocks: int | None = Field(None, ge=2, le=MAX_COUNT, description="KV blocks; unset: from memory")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="KV memory; unset: 1 GiB on a CPU, what gpu_memory_utilization leaves on a GPU"
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of a GPU's memory that may be in use, by all processes; unset: 0.90"
    )
    max_model_len: int | None = Field(None, ge=1, le=MAX_COUNT, description="longest sequence; unset: the model's own")
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="sequence slots; unset: 256 on a CPU, on a GPU 1024, with less than 70 GiB 256",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="most tokens that a step may hold; unset: 512 on a CPU, on a GPU 8192, with less than 70 GiB 2048",
    )
    num_threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; unset: chosen from the cores")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    seed: int = Field(0, ge=0, description="seed of dummy weights")

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ValueError(
                f"num_blocks is {self.num_blocks} and kv_cache_gib is {self.kv_cache_gib:g}: both size the KV cache, "
                "give one of them"
            )
        if self.device == "cpu" and self.gpu_memory_utilization is not None:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization:g} and device is cpu: on a CPU kv_cache_gib "
                "or num_blocks sizes the KV cache"
            )
        held = self.num_blocks and self.num_blocks * self.block_size
        if held and self.max_model_len is not None and held < self.max_model_len:
            raise ValueError(
                f"max_model_len is {self.max_model_len} and num_blocks is {self.num_blocks}: with block_size "
                f"{self.block_size} the KV cache holds {held} tokens, {-(-self.max_model_len // self.block_size)} "
                "blocks are needed"
            )
        return self


class ServeSettings(CommonSettings):
    """`pagemill serve`: the supervisor. Options of the three services are taken too and passed on."""

    redis: Literal["auto", "off"] = Field("auto", description="start a private redis-server where one is found")
    redis_maxmemory_mb: int = Field(256, ge=8, description="memory of the private redis-server in MiB")
    num_workers: int = Field(1, ge=1, description="worker processes")
    restart: bool = Field(True, description="start a process again that died")
    start_timeout_s: float = Field(900.0, gt=0, description="longest time from the first process to the first answer")
