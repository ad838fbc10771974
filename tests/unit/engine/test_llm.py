from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import engine
from engine import LLM, EngineConfig, FinishReason, SamplingParams
from engine.model import load_model
from engine.model.catalog import ModelNotFound
from engine.request import RequestRefused


def test_prompts_in_any_form_give_outputs_in_their_order() -> None:
    with LLM("fake") as llm:
        [one] = llm.generate("hello")
        [ids] = llm.generate(list(b"hello"))
        prompts: list[str | list[int]] = ["hello", list(b"hello"), "bye"]
        many = llm.generate(prompts)
        assert llm.generate([]) == []
    assert one.text == ids.text == many[0].text == many[1].text != many[2].text
    assert [output.prompt_token_ids for output in many] == [tuple(b"hello"), tuple(b"hello"), tuple(b"bye")]


def test_places_are_texts_or_paths(tmp_path: Path) -> None:
    with LLM("fake", cache=str(tmp_path)) as llm:
        assert llm.config.cache == tmp_path
    with pytest.raises(ModelNotFound, match="nothing-here"):
        LLM(tmp_path / "nothing-here", cache=tmp_path)


def test_parameters_are_for_all_or_for_each() -> None:
    with LLM("fake") as llm:
        assert [len(o.token_ids) for o in llm.generate(["a", "b"])] == [16, 16]
        assert [len(o.token_ids) for o in llm.generate(["a", "b"], SamplingParams(max_tokens=3))] == [3, 3]
        each = [SamplingParams(max_tokens=n) for n in (5, 2)]
        assert [len(o.token_ids) for o in llm.generate(["a", "b"], each)] == [5, 2]
        with pytest.raises(ValueError, match="2 prompts need as many"):
            llm.generate(["a", "b"], each[:1])


def test_chats_are_one_or_many() -> None:
    hi, bye = [[{"role": "user", "content": text}] for text in ("hi", "bye")]
    with LLM("fake") as llm:
        [one] = llm.chat(hi)
        both = llm.chat([hi, bye])
        [raw] = llm.generate("<|user|>hi<|end|><|assistant|>")
    assert one.text == both[0].text == raw.text
    assert len(both) == 2


def test_progress_counts_what_is_finished() -> None:
    seen: list[tuple[int, int]] = []
    with LLM("fake") as llm:
        llm.generate(["a"] * 3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_refused_prompt_is_raised_and_nothing_stays_behind() -> None:
    with LLM("fake") as llm:
        with pytest.raises(RequestRefused, match="empty"):
            llm.generate(["a", ""])
        assert [output.finish_reason for output in llm.generate("a")] == [FinishReason.LENGTH]


def test_an_interrupted_run_leaves_nothing_behind() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with LLM("fake") as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=900)], interrupt)
        seen: list[tuple[int, int]] = []
        llm.generate("a", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]


def test_a_prompt_that_fails_has_an_output_with_the_error() -> None:
    with LLM("fake") as llm:
        bad, good = llm.generate(["<<raise>>", "a"])
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_threads_may_share_it() -> None:
    """Each gets its own answer, whole; calls that step one engine together would mix up its requests."""
    prompts = [f"prompt {number}" for number in range(6)]
    with LLM("fake") as llm:
        alone = [llm.generate(prompt)[0].text for prompt in prompts]
        with ThreadPoolExecutor(6) as pool:
            for _ in range(10):
                together = pool.map(lambda prompt: llm.generate(prompt)[0].text, prompts)
                assert list(together) == alone


def test_nothing_is_generated_after_it_is_closed() -> None:
    llm = LLM("fake")
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("a"), llm.sleep, llm.wake):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_callback_that_uses_the_model_is_refused_and_not_stuck() -> None:
    with LLM("fake") as llm:
        for use in (lambda *_: llm.generate("b"), lambda *_: llm.close()):
            with pytest.raises(RuntimeError, match="in use"):
                llm.generate("a", progress=use)
        assert llm.generate("a")[0].finish_reason is FinishReason.LENGTH


FORKED = """
import os, sys
from pathlib import Path
from bench.endurance.random_model import write_random_model
from engine import LLM

place = Path(sys.argv[1])
llm = LLM(write_random_model(place / "model"), cache=place / "cache", kv_cache_bytes=2**22, max_seq_len=256, threads=2)
llm.generate("hello")
child = os.fork()
if not child:
    try:
        llm.generate("hello")
    except RuntimeError as error:
        print(error, flush=True)
    llm.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
print("ended with", status, llm.generate("hello")[0].finish_reason)
llm.close()
"""


def test_a_forked_process_is_told_and_not_stuck(tmp_path: Path, python: str) -> None:
    """The threads that compute stay in the process that made them: whoever waits for them elsewhere waits for ever."""
    told = subprocess.run(
        [python, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "before this process was forked" in told
    assert "ended with 0 length" in told


def test_the_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be a whole number, at least 1"):
        LLM("fake", max_num_seqs=0)


def test_the_fake_model_is_found_by_its_name() -> None:
    assert load_model(EngineConfig("fake:context_len=99")).info.context_len == 99


def test_the_public_names() -> None:
    assert engine.__all__ == ["LLM", "EngineConfig", "FinishReason", "KVCompression", "RequestOutput", "SamplingParams"]
    assert all(hasattr(engine, name) for name in engine.__all__)


def test_nothing_but_a_real_model_imports_torch() -> None:
    code = (
        "import sys, engine.scheduler, engine.thread; from engine import LLM; LLM('fake').generate('a');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
