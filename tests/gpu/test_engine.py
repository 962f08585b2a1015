"""The engine on a GPU: the public model's tokens, requests that come, go and are preempted, and bundles."""

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import golden, near_ties
from wavegraph.capture.device import CudaDevice
from wavegraph.config import EngineConfig
from wavegraph.llm import LLM
from wavegraph.sampling import SamplingParams
from wavegraph.startup.precompile import precompile

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINTS = ("tiny", "tiny_gqa", "tiny_hd32")
OPTIONS = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 32}
EXITS = {0.3: "gen_tokens_thr_0.3", 0.7: "gen_tokens_thr_0.7"}


def params(tokens: int, **options: float) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("wavefront", [True, False])
def test_goldens(checkpoint: str, wavefront: bool) -> None:
    """Float32, at full depth and with early exits, beside each other; near ties may go either way."""
    gold = golden(checkpoint)
    prompt = gold["gen_prompt"].tolist()
    config = EngineConfig(wavefront=wavefront, prefill_chunk_size=5, check=True, **OPTIONS)  # type: ignore[arg-type]
    keys = ["gen_tokens", *EXITS.values()]
    wanted = [gold[key].tolist() for key in keys]
    all_params = [params(len(wanted[0])), *(params(len(wanted[0]), exit_threshold=threshold) for threshold in EXITS)]
    with LLM(GOLDENS / checkpoint, config, dtype="float32", backend="cuda") as llm:
        outputs = llm.generate([prompt] * len(keys), all_params)
    ties = near_ties(checkpoint, prompt, outputs[0].token_ids, wanted[0])
    assert ties or list(outputs[0].token_ids) == wanted[0]
    for key, output, tokens in zip(keys[1:], outputs[1:], wanted[1:], strict=True):
        assert list(output.token_ids) == tokens, key


def test_cancelled_and_preempted_requests_leave_no_trace() -> None:
    """Few pages and random ends: what runs through has the tokens that it has alone."""
    draw = random.Random(4)
    prompts = [draw.choices(range(256), k=draw.randrange(3, 60)) for _ in range(24)]
    config = EngineConfig(deterministic=True, num_pages=14, run_ahead=3, **OPTIONS)  # type: ignore[arg-type]
    with LLM(GOLDENS / "tiny", config, dtype="bfloat16", backend="cuda") as llm:
        alone = [llm.generate(prompt, params(40))[0].token_ids for prompt in prompts]
        engine = llm.engine
        ids = [engine.add_request(f"r{index}", prompt, params(40))[0] for index, prompt in enumerate(prompts)]
        cancelled: set[str] = set()
        done = {}
        while engine.has_unfinished:
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output.token_ids
            if draw.random() < 0.05:
                victim = draw.choice(ids)
                if engine.abort(victim):
                    cancelled.add(victim)
        assert engine.stats().preemptions > 0
        assert engine.stats().free_pages + engine.stats().cached_pages == 14
    assert cancelled
    assert done.keys() == set(ids) - cancelled
    for request_id, tokens in done.items():
        assert tokens == alone[int(request_id[1:])], request_id


def test_a_bundle_gives_the_tokens_of_the_compiler(tmp_path: Path) -> None:
    target = CudaDevice().architecture
    bundle = precompile(
        GOLDENS / "tiny", tmp_path / "bundle", target=target, ladder=[1, 8, 32], dtype="bfloat16",
    )  # fmt: skip
    config = EngineConfig(buckets=(1, 8, 32), **OPTIONS)  # type: ignore[arg-type]
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    tokens = []
    for folder in (None, bundle.folder):
        with LLM(GOLDENS / "tiny", config, dtype="bfloat16", bundle=folder) as llm:
            assert llm.engine.model.weights.embedding.is_cuda
            tokens.append([output.token_ids for output in llm.generate(prompts, params(20))])
    assert tokens[0] == tokens[1]


def test_the_pool_takes_what_the_gpu_has_left() -> None:
    config = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=32)
    with LLM(GOLDENS / "tiny", config, dtype="float32", backend="cuda") as llm:
        memory = CudaDevice().memory()
        assert memory.free < 0.05 * memory.total
        assert llm.generate([1, 2, 3], params(4))[0].finish_reason == "length"
    torch.cuda.empty_cache()
