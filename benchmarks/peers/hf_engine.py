"""transformers on CPU, in process: static batches by `generate`, and its own continuous batching.

Run by run.py as a process of its own, so that its threads and memory touch no other engine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from measure import RequestTimes, append_record, make_record
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from workloads import CONCURRENT, Request, make_workloads

PAD_TOKEN_ID = 2


class ArrivalTimes:
    """A streamer for `generate` that notes when each step's tokens came; the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return


class StaticBatch:
    """All requests of a batch padded to the longest prompt and run to the longest output."""

    label = "transformers static"

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def _generate(self, requests: list[Request], arrivals: ArrivalTimes | None) -> None:
        width = max(len(r.prompt) for r in requests)
        ids = torch.full((len(requests), width), PAD_TOKEN_ID)
        mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        longest = max(r.num_output_tokens for r in requests)
        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            pad_token_id=PAD_TOKEN_ID,
            streamer=arrivals,
        )

    def run(self, requests: list[Request], concurrent: bool) -> list[RequestTimes]:
        if concurrent:
            # A streamer takes batches of one only, so that a batch has no times per request.
            self._generate(requests, None)
            return [RequestTimes(0.0, [], r.num_output_tokens) for r in requests]
        results = []
        for request in requests:
            start, arrivals = time.perf_counter(), ArrivalTimes()
            self._generate([request], arrivals)
            results.append(RequestTimes(start, arrivals.times[1:], request.num_output_tokens))
        return results

    def close(self) -> None:
        return


class ContinuousBatch:
    """transformers' ContinuousBatchingManager."""

    label = "transformers continuous"

    def __init__(self, model: torch.nn.Module) -> None:
        generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=PAD_TOKEN_ID)
        batching = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=1024, max_requests_per_batch=64)
        self.manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        self.manager.start()

    def _next(self):
        while True:
            output = self.manager.get_result(timeout=1)
            if output is not None:
                return output
            if not self.manager.is_running():
                raise RuntimeError("the continuous batching manager died")

    def run(self, requests: list[Request], concurrent: bool) -> list[RequestTimes]:
        results = []
        if concurrent:
            for row, request in enumerate(requests):
                self.manager.add_request(request.prompt, request_id=f"r{row}", max_new_tokens=request.num_output_tokens)
            while len(results) < len(requests):
                output = self._next()
                if output.is_finished():
                    results.append(RequestTimes(0.0, [], len(output.generated_tokens)))
            return results
        for row, request in enumerate(requests):
            start, arrivals = time.perf_counter(), []
            self.manager.add_request(
                request.prompt, request_id=f"s{row}", max_new_tokens=request.num_output_tokens, streaming=True
            )
            while True:
                output = self._next()
                arrivals.append(time.perf_counter())
                if output.is_finished():
                    break
            results.append(RequestTimes(start, arrivals, len(output.generated_tokens)))
        return results

    def close(self) -> None:
        self.manager.stop(block=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--mode", choices=["static", "continuous"], required=True)
    parser.add_argument("--only", default="W1,W2,W3,W4")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    workloads = make_workloads(args.model)
    with torch.inference_mode():
        engine = {"static": StaticBatch, "continuous": ContinuousBatch}[args.mode](model)
        engine.run([Request(workloads["W2"][0].prompt, 4)] * 2, True)
        for name in args.only.split(","):
            for repeat in range(args.repeats):
                start, cpu_start = time.perf_counter(), time.process_time()
                times = engine.run(workloads[name], CONCURRENT[name])
                wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
                append_record(args.out, make_record(engine.label, name, repeat, workloads[name], times, wall_s, cpu_s))
        engine.close()


if __name__ == "__main__":
    main()
