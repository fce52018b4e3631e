"""transformers beside Pagemill: its continuous batching, and static batches of `generate`, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.bench.engines import FreshWorkloads, check_lengths
from pagemill.bench.machine import device_name_here
from pagemill.bench.throughput import Case, Measurement, measure
from pagemill.bench.workloads import FixedLengths
from pagemill.errors import ModelLoadError, PagemillError
from pagemill.model_source import ModelSource, load_config

_PAD_TOKEN_ID = 0
_POLL_S = 1.0
_CPU_BATCH_TOKENS = 1024
_DTYPES = {"half": "float16", "auto": "bfloat16"}

Mode = Literal["static", "continuous"]


@dataclass(frozen=True, slots=True)
class PeerModel:
    """What transformers loads: weights of `source`, or random ones of its shape."""

    source: ModelSource
    is_dummy: bool
    dtype: str
    device: str


class TransformersEngine:
    """A model of transformers in this process.

    Args:
        model: what `load_peer` made.
        mode: batches of `generate`, or continuous batching.
        cases: what it will be asked for at most.
    """

    model = ""

    def __init__(self, model: Any, mode: Mode, cases: Sequence[Case]) -> None:
        import torch
        import transformers

        self._torch = torch
        self._mode = mode
        self._model = model
        self._where = model.device
        self._num_runs = 0
        self._manager: Any = None
        if mode == "continuous":
            longest = max(case.input_len + case.output_len for case in cases)
            self._manager = self._started_manager(max(case.at_once for case in cases), longest)
        self.backend = f"transformers {transformers.__version__} {mode}"
        self.device = device_name_here(self._where.type)

    def generate(self, workload: FixedLengths, count: int, at_once: int) -> Sequence[float]:
        prompts = [workload.conversation(index).turns[0].token_ids for index in range(count)]
        run = self._static if self._mode == "static" else self._continuous
        self._synchronize()
        begin_s = time.perf_counter()
        lengths = run(prompts, workload.output_len, at_once)
        self._synchronize()
        elapsed_s = time.perf_counter() - begin_s
        check_lengths(lengths, workload.output_len, count)
        return [elapsed_s]

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)

    def _static(self, prompts: list[list[int]], output_len: int, at_once: int) -> list[int]:
        lengths: list[int] = []
        for first in range(0, len(prompts), at_once):
            ids = self._torch.tensor(prompts[first : first + at_once], device=self._where)
            made = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                eos_token_id=None,
                pad_token_id=_PAD_TOKEN_ID,
            )
            lengths += [made.shape[1] - ids.shape[1]] * len(ids)
        return lengths

    def _continuous(self, prompts: list[list[int]], output_len: int, at_once: int) -> list[int]:
        """Through one manager that lives as long as the engine, so that its start and its graphs are not timed."""
        waiting = list(enumerate(prompts))
        lengths: list[int] = []
        self._num_runs += 1
        while len(lengths) < len(prompts):
            while waiting and len(prompts) - len(waiting) - len(lengths) < at_once:
                at, prompt = waiting.pop(0)
                name = f"{self._num_runs}-{at}"
                self._manager.add_request(prompt, request_id=name, max_new_tokens=output_len)
            output = self._manager.get_result(timeout=_POLL_S)
            if output is None and not self._manager.is_running():
                raise PagemillError("transformers' continuous batching ended by itself; its log says why")
            if output is not None and output.is_finished():
                lengths.append(len(output.generated_tokens))
        return lengths

    def _started_manager(self, at_once: int, longest: int) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=_PAD_TOKEN_ID
        )
        batching = ContinuousBatchingConfig()
        if self._where.type == "cpu":
            # Its own choice is a share of the memory of a GPU; of a CPU's it takes all.
            blocks = at_once * (-(-longest // batching.page_size) + 1)
            batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=_CPU_BATCH_TOKENS)
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        manager.start()
        return manager

    def _synchronize(self) -> None:
        if self._where.type == "cuda":
            self._torch.cuda.synchronize()


def load_peer(model: PeerModel) -> Any:
    """The model, on its device.

    Raises:
        ModelLoadError: transformers cannot load it.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    where = torch.device("cuda" if model.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, _DTYPES.get(model.dtype, model.dtype))
    try:
        if model.is_dummy:
            config = AutoConfig.for_model(**load_config(model.source))
            # Random weights are drawn where they will be: on a CPU an 8B model would take minutes.
            with torch.device(where):
                made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        else:
            folder, file = model.source.path, {}
            if model.source.kind == "gguf":
                folder, file = model.source.path.parent, {"gguf_file": model.source.path.name}
            made = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **file)
    except (OSError, ValueError, KeyError) as err:
        raise ModelLoadError(f"transformers cannot load {str(model.source.path)!r}: {err}", field="model") from err
    made = made.to(where).eval()
    made.generation_config = GenerationConfig(do_sample=False, pad_token_id=_PAD_TOKEN_ID)
    return made


def transformers_rows(
    model: PeerModel,
    static_cases: Sequence[Case],
    continuous_cases: Sequence[Case],
    workloads: FreshWorkloads,
    repeats: int,
) -> Iterator[Measurement]:
    """Measurements of transformers, static batches first; to be run in a process of its own.

    Raises:
        PagemillError: transformers is not installed, or an answer is shorter than was asked for.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as err:
        raise PagemillError(f"--peer transformers: {err.name} is not installed: pip install 'transformers>=5'") from err
    cases_of_mode: dict[Mode, Sequence[Case]] = {"static": static_cases, "continuous": continuous_cases}
    with torch.inference_mode():
        loaded = load_peer(model)
        for mode, cases in cases_of_mode.items():
            engine = TransformersEngine(loaded, mode, cases)
            try:
                yield from measure(engine, cases, workloads, repeats)
            finally:
                engine.close()
