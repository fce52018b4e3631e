from pagemill.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "result", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    result: StepResult
    draining: WorkerDraining
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., draining: _Optional[_Union[WorkerDraining, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "version", "model", "model_fingerprint", "group", "rank", "world_size", "num_blocks", "block_size", "num_slots", "max_model_len", "vocab_size", "max_step_tokens", "device", "kv_bytes_per_token", "kv_depends_on_prompt_length")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_DEPENDS_ON_PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    version: str
    model: str
    model_fingerprint: str
    group: str
    rank: int
    world_size: int
    num_blocks: int
    block_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    max_step_tokens: int
    device: str
    kv_bytes_per_token: int
    kv_depends_on_prompt_length: bool
    def __init__(self, worker_id: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., device: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_depends_on_prompt_length: bool = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step", "sampled_token_ids", "logprobs", "prompt_logprobs", "failures", "forward_ns", "sample_ns", "gap_ns")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    GAP_NS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    sampled_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SampleLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[ChunkLogprobs]
    failures: _containers.RepeatedCompositeFieldContainer[SlotFailure]
    forward_ns: int
    sample_ns: int
    gap_ns: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., sampled_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SampleLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[ChunkLogprobs, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[SlotFailure, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., gap_ns: _Optional[int] = ...) -> None: ...

class SampleLogprobs(_message.Message):
    __slots__ = ("position", "columns")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    position: int
    columns: _common_pb2.LogprobColumns
    def __init__(self, position: _Optional[int] = ..., columns: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...

class ChunkLogprobs(_message.Message):
    __slots__ = ("slot", "first_position", "columns")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    first_position: int
    columns: _common_pb2.LogprobColumns
    def __init__(self, slot: _Optional[int] = ..., first_position: _Optional[int] = ..., columns: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...

class SlotFailure(_message.Message):
    __slots__ = ("slot", "error")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    slot: int
    error: _common_pb2.Error
    def __init__(self, slot: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class WorkerDraining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StepMessage(_message.Message):
    __slots__ = ("attached", "step", "drain", "profile")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    step: Step
    drain: Drain
    profile: Profile
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "scheduler_id", "max_num_batched_tokens", "max_num_seqs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    scheduler_id: str
    max_num_batched_tokens: int
    max_num_seqs: int
    def __init__(self, epoch: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("epoch", "step", "released_slots", "new_sequences", "slots", "num_tokens", "sample", "new_block_counts", "new_block_ids", "copy_sources", "copy_destinations", "trace_links")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    TRACE_LINKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    released_slots: _containers.RepeatedScalarFieldContainer[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    slots: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    sample: _containers.RepeatedScalarFieldContainer[bool]
    new_block_counts: _containers.RepeatedScalarFieldContainer[int]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_destinations: _containers.RepeatedScalarFieldContainer[int]
    trace_links: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., released_slots: _Optional[_Iterable[int]] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., slots: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., sample: _Optional[_Iterable[bool]] = ..., new_block_counts: _Optional[_Iterable[int]] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_destinations: _Optional[_Iterable[int]] = ..., trace_links: _Optional[_Iterable[str]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("slot", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "masked_until_min_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MASKED_UNTIL_MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    masked_until_min_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., masked_until_min_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Profile(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...
