"""The offline engine on the real weights."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pagemill import LLM, AsyncLLMEngine, SamplingParams
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError, UnavailableError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "The sky is", "def main():", "1, 2, 3, 4,", "Water boils at"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=256, block_size=8, max_model_len=512, max_num_seqs=4) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts_and_do_not_depend_on_company(llm: LLM) -> None:
    together = llm.generate(PROMPTS * 3, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == PROMPTS * 3
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    for output, reference in zip(together, alone * 3, strict=True):
        assert output.finished
        assert output.outputs[0].token_ids == reference.outputs[0].token_ids
        assert output.outputs[0].text == reference.outputs[0].text
        assert len(output.outputs[0].token_ids) == 12
    assert len({output.request_id for output in together}) == len(together)


def test_token_ids_and_text_give_the_same_output(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])
    by_text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    for given in (token_ids, [token_ids]):
        by_ids = llm.generate(prompt_token_ids=given, sampling_params=GREEDY, use_tqdm=False)
        assert by_ids[0].outputs[0].token_ids == by_text[0].outputs[0].token_ids
        assert by_ids[0].prompt_token_ids == by_text[0].prompt_token_ids == token_ids
        assert by_ids[0].prompt is None


def test_prompts_may_be_texts_and_ids_as_with_the_client(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])
    by_text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    for given in (token_ids, [token_ids], [PROMPTS[0], token_ids], np.array(token_ids)):
        for output in llm.generate(given, GREEDY, use_tqdm=False):
            assert output.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_no_prompts_are_no_outputs_and_no_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate(prompt_token_ids=[]) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("prompts", ["", [""], ["a", ""], [[]]])
def test_an_empty_prompt_is_refused_in_the_words_of_the_server(llm: LLM, prompts: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompts", [5, {"a": 1}, [None], [["a"]], [[True]], b"ab"])
def test_a_prompt_of_another_kind_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat("hi", use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, "greedy", [{"max_tokens": 3}]])
def test_sampling_params_of_another_kind_are_refused(llm: LLM, params: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams") as caught:
        llm.generate("a", params, use_tqdm=False)  # type: ignore[arg-type]
    assert caught.value.field == "sampling_params"


def test_a_variable_of_the_kernels_is_judged_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CPU_ISA", "foo")
    with pytest.raises(ConfigError, match="PAGEMILL_CPU_ISA"):
        LLM("./no/such/model")


def test_without_parameters_the_documented_defaults_hold(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 16 or output.finish_reason == "stop"


def test_a_conversation_is_rendered_by_the_template_and_ends_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text
    pair = llm.chat([messages, messages], [GREEDY, GREEDY], use_tqdm=False)
    assert pair[0].outputs[0].text == pair[1].outputs[0].text


def test_seeds_repeat_and_sequences_of_one_request_differ(llm: LLM) -> None:
    params = SamplingParams(seed=5, n=3, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    free = llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[4:7]
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop)
    cut = llm.generate(PROMPTS[3], params, use_tqdm=False)[0]
    assert cut.outputs[0].text == free.text[: free.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.finished
    assert cut.metrics is not None


def test_log_probabilities_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    result = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    output = result.outputs[0]
    assert output.logprobs is not None
    assert output.cumulative_logprob is not None
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        assert max(position, key=lambda each: position[each].logprob) == token_id
        assert position[token_id].rank == 1
        assert len(position) == 3
        assert sum(math.exp(entry.logprob) for entry in position.values()) <= 1.0001
    assert (
        "".join(
            position[token_id].decoded_token or ""
            for token_id, position in zip(output.token_ids, output.logprobs, strict=True)
        )
        == output.text
    )
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None
    assert all(entry is not None for entry in result.prompt_logprobs[1:])


def test_a_repeated_prompt_reads_the_prefix_cache(llm: LLM) -> None:
    prompt = "A rare sentence that no other test has used before, long enough for blocks. " * 3
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_one_bad_prompt_refuses_the_call_and_the_next_call_works(llm: LLM) -> None:
    bad = SamplingParams(logit_bias={10**6: 1.0})
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        llm.generate(PROMPTS[:2], [GREEDY, bad], use_tqdm=False)
    with pytest.raises(ContextLengthError, match="512"):
        llm.generate("word " * 600, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPTS[0], [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="exactly one"):
        llm.generate(use_tqdm=False)
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


def test_a_sequence_ends_at_the_context_length(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5000, ignore_eos=True)
    result = llm.generate("word " * 490, params, use_tqdm=False)[0]
    assert result.outputs[0].finish_reason == "length"
    assert len(result.prompt_token_ids) + len(result.outputs[0].token_ids) == 512


def test_the_progress_bar_is_there_when_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=True)
    assert "1/1" in capfd.readouterr().err
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


async def test_the_event_loop_runs_on_while_one_waits(llm: LLM) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    outputs = await asyncio.gather(*(llm.generate_async(prompt, GREEDY) for prompt in PROMPTS[:2]))
    ticking.cancel()
    assert [output.prompt for output in outputs] == PROMPTS[:2]
    assert ticks > 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"block_size": 7}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"max_model_len": 8192, "kv_cache_gib": 0.01}, "max_model_len"),
        ({"max_model_len": 8192, "num_blocks": 16}, "max_model_len"),
        ({"num_blocks": 16, "kv_cache_gib": 1.0}, "num_blocks"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"max_num_batched_tokens": 1 << 31}, "max_num_batched_tokens"),
        ({"kv_cache_gib": 1e-6}, "kv_cache_gib"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        LLM(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == name


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelLoadError, match="no/such/model"):
        LLM("./no/such/model")


def test_a_disposed_engine_says_so() -> None:
    llm = LLM(num_blocks=16, max_model_len=64)
    llm.dispose()
    llm.dispose()
    with pytest.raises(UnavailableError, match="disposed"):
        llm.generate(PROMPTS[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_memory_comes_back_and_a_second_model_gets_as_much() -> None:
    def used_bytes() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    tolerance = 0.02 * torch.cuda.get_device_properties(0).total_memory
    torch.zeros(1, device="cuda")
    before = used_bytes()
    seen = []
    for _ in range(2):
        with LLM(device="cuda", gpu_memory_utilization=0.5) as llm:
            (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
            seen.append((output.outputs[0].token_ids, used_bytes()))
        assert abs(used_bytes() - before) < tolerance
    assert seen[0][0] == seen[1][0]
    assert abs(seen[0][1] - seen[1][1]) < tolerance
    assert seen[0][1] - before > 10 * tolerance


async def test_a_disposed_engine_leaves_no_model_behind() -> None:
    def num_models() -> int:
        gc.collect()
        return sum(type(item).__name__ == "LlamaForCausalLM" for item in gc.get_objects())

    before = num_models()
    llm = LLM(num_blocks=16, max_model_len=64)
    assert num_models() == before + 1
    llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    llm.dispose()
    assert num_models() == before
    engine = AsyncLLMEngine(EngineArgs(num_blocks=16, max_model_len=64))
    async for _ in engine.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2)):
        pass
    assert num_models() == before + 1
    engine.shutdown()
    assert num_models() == before
