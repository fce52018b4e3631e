from pagemill.v1 import common_pb2 as _common_pb2
from pagemill.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "flow_control")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FLOW_CONTROL_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    abort: Abort
    flow_control: FlowControl
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., flow_control: _Optional[_Union[FlowControl, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    version: str
    def __init__(self, router_id: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "token_ids", "sampling", "eos_token_ids", "priority", "deadline_unix_ns", "cache_salt", "delivered", "traceparent", "tenant")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    deadline_unix_ns: int
    cache_salt: bytes
    delivered: _containers.RepeatedCompositeFieldContainer[DeliveredTokens]
    traceparent: str
    tenant: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., deadline_unix_ns: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., delivered: _Optional[_Iterable[_Union[DeliveredTokens, _Mapping]]] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DeliveredTokens(_message.Message):
    __slots__ = ("index", "token_ids", "finished")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handle", "index")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class FlowControl(_message.Message):
    __slots__ = ("max_inflight_requests",)
    MAX_INFLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    max_inflight_requests: int
    def __init__(self, max_inflight_requests: _Optional[int] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("hello", "output", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    output: StepOutput
    load: LoadReport
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., output: _Optional[_Union[StepOutput, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("scheduler_id", "version", "model", "model_fingerprint", "max_model_len", "vocab_size", "block_size", "ready", "draining", "kv_capacity_tokens")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    version: str
    model: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    ready: bool
    draining: bool
    kv_capacity_tokens: int
    def __init__(self, scheduler_id: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., ready: bool = ..., draining: bool = ..., kv_capacity_tokens: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "handles", "indexes", "counts", "token_ids", "logprobs", "finished", "errors", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[RunLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    errors: _containers.RepeatedCompositeFieldContainer[RequestError]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[RunLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[RequestError, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class RunLogprobs(_message.Message):
    __slots__ = ("run", "columns")
    RUN_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    run: int
    columns: _common_pb2.LogprobColumns
    def __init__(self, run: _Optional[int] = ..., columns: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "columns")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    columns: _common_pb2.LogprobColumns
    def __init__(self, handle: _Optional[int] = ..., columns: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "index", "reason", "stop_token_id", "request_finished", "usage", "timings")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    reason: _common_pb2.FinishReason
    stop_token_id: int
    request_finished: bool
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., request_finished: bool = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("handle", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    error: _common_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "total_blocks", "workers", "preemptions", "prefix_hashes_added", "prefix_hashes_evicted", "prefix_hashes_reset")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_ADDED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_RESET_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    workers: int
    preemptions: int
    prefix_hashes_added: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes_evicted: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes_reset: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., workers: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_hashes_added: _Optional[_Iterable[int]] = ..., prefix_hashes_evicted: _Optional[_Iterable[int]] = ..., prefix_hashes_reset: bool = ...) -> None: ...
