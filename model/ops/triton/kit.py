"""What all Triton operators share: launching by name, and small arithmetic."""

from collections.abc import Mapping

from wavegraph.model.io import Pools, StepIO
from wavegraph.model.ops.triton.launch import Constant, Launcher, Value, describe


class Kernels:
    """Something that launches kernels."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        arguments: Mapping[str, Value],
        constants: Mapping[str, Constant],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        fp_fusion: bool = True,
    ) -> None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.launcher(describe(kernel, grid, arguments, constants, fp_fusion=fp_fusion, **options))


def scratch_slot(io: StepIO) -> int:
    """The slot of padding."""
    return io.token_table.shape[0] - 1


def scratch_page(pools: Pools) -> int:
    """The page of padding."""
    return pools.hidden.shape[0] - 1


def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def power(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()
