"""The kernels that an engine's programs launch: listed by running them, compiled for chips that are not here."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits
from wavegraph.capture.needed_kernels import kernel_specs
from wavegraph.errors import ConfigError, EngineError
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.triton.compile import SHARED_LIMITS, compile_kernel, resources
from wavegraph.model.ops.triton.launch import KernelSpec, load_kernels
from wavegraph.model.ops.triton.ops import key_block

HEAD_DIMS = (128, 64)
TARGETS = tuple(SHARED_LIMITS)

KERNELS = (
    "update_tables", "plan_tiles", "expand", "gather", "norm", "residual_norm", "rope_write", "silu_mul",
    "scatter_gate", "coda_gather", "attention", "merge_splits", "gemm", "leave", "draw_greedy", "copy_exits",
    "count_tokens", "order_logits", "weigh", "pick", "score",
)  # fmt: skip


@cache
def recorded(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, deterministic: bool = True) -> list[KernelSpec]:
    """What an engine of Ouro-1.4B's shape launches; with ``head_dim`` 64 it has twice the heads."""
    config = OuroConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=2,
        num_attention_heads=2048 // head_dim,
        num_key_value_heads=2048 // head_dim,
        head_dim=head_dim,
        total_ut_steps=4,
        max_position_embeddings=65536,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        early_exit_threshold=1.0,
        eos_token_ids=(0,),
        dtype="bfloat16",
    )
    limits = Limits(
        max_num_seqs=64,
        max_spans=256,
        max_rows=1024,
        max_coda_rows=64,
        max_model_len=8192,
        page_size=16,
        num_pages=1000,
    )
    ladders = Ladder([1, 16, 1024]), Ladder([1, 64])
    return list(kernel_specs(config, dtype, limits, *ladders, deterministic=deterministic))


def of(kernel: str, head_dim: int = 128) -> KernelSpec:
    return next(spec for spec in recorded(head_dim) if spec.kernel == kernel)


def test_the_list_is_all_kernels() -> None:
    assert set(KERNELS) == {spec.kernel for spec in recorded()} == set(load_kernels())
    without = {spec.kernel for spec in recorded(deterministic=False)}
    assert without == set(KERNELS) - {"gemm"}


def test_buckets_share_their_kernels() -> None:
    """One binary serves every bucket and layer; only `gemm` has one for each shape of weights."""
    names = [spec.kernel for spec in recorded() if spec.kernel != "gemm"]
    assert len(names) == len(set(names))
    assert len({spec.name for spec in recorded()}) == len(recorded())


def test_arguments_stand_in_the_order_of_parameters() -> None:
    """A launcher of binaries knows no names: values go in as they stand."""
    for spec in recorded():
        names = [name for name, _ in spec.arguments] + [name for name, _ in spec.constants]
        assert names == load_kernels()[spec.kernel].arg_names, spec.kernel


def test_the_jit_specialises_on_what_a_spec_holds() -> None:
    """Else it would compile anew for another bucket or layer, or a binary made ahead of time would be another one."""
    for spec in recorded():
        function = load_kernels()[spec.kernel]
        for name, _ in spec.arguments:
            parameter = function.params[function.arg_names.index(name)]
            pointer, table = name.endswith("_ptr"), name.endswith("_tab")
            assert parameter.do_not_specialize == (not pointer and not table), name
            assert parameter.do_not_specialize_on_alignment == table, name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, kernel: str) -> None:
    """At both head sizes, within the target's shared memory, without spills."""
    for spec in {of(kernel, head_dim) for head_dim in HEAD_DIMS}:
        binary = compile_kernel(spec, target)
        assert binary.cubin.startswith(b"\x7fELF")
        assert binary.entry == kernel
        assert binary.shared <= SHARED_LIMITS[target]
        used = resources(binary.cubin)
        assert (used.stack, used.local) == (0, 0), used
        assert used.registers * 32 * spec.num_warps <= 65536


def test_shared_memory_beyond_the_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = compile_kernel(of("attention"), "sm_80")
    monkeypatch.setitem(SHARED_LIMITS, "sm_80", binary.shared - 1)
    with pytest.raises(ConfigError, match=f"attention: needs {binary.shared} bytes of shared memory, but sm_80 has"):
        compile_kernel(of("attention"), "sm_80")


def test_scratch_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of cubins gives null pointers for it."""
    metadata = SimpleNamespace(shared=0, global_scratch_size=128, profile_scratch_size=0)
    monkeypatch.setattr("triton.compile", lambda *args, **options: SimpleNamespace(metadata=metadata))
    with pytest.raises(EngineError, match="norm: asks for scratch memory in its sm_90 binary"):
        compile_kernel(of("norm"), "sm_90")


def test_spills_show() -> None:
    """A row of 8,192 does not fit the registers of one warp, and the resources say so."""
    spec = of("residual_norm")
    wide = tuple((name, 8192) for name, _ in spec.constants)
    used = resources(compile_kernel(replace(spec, constants=wide, num_warps=1), "sm_90").cubin)
    assert used.stack > 0


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="target: 'sm_75' is unknown; use one of sm_80, sm_90, sm_100"):
        compile_kernel(of("norm"), "sm_75")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_every_head_dim_compiles(target: str, dtype: torch.dtype) -> None:
    """All kernels in each dtype; those that know head_dim at every multiple of 16, those that know pages at 16..64."""
    for spec in recorded(dtype=dtype):
        constants = dict(spec.constants)
        if "HEAD_DIM" not in constants:
            compile_kernel(spec, target)
            continue
        for head_dim in range(16, 257, 16):
            block = 1 << (head_dim - 1).bit_length()
            wanted = {"HEAD_DIM": head_dim, "PAGE_SIZE": (16, 32, 64)[head_dim // 16 % 3]}
            wanted["BLOCK_D"] = max(8, block // 2) if spec.kernel == "rope_write" else block
            wanted["BLOCK_N"] = key_block(block, dtype)
            changed = tuple((name, wanted.get(name, value)) for name, value in spec.constants)
            compile_kernel(replace(spec, constants=changed), target)
