"""Compiles a program for a device that is not here, and says what came out: static figures, no speed."""

from collections.abc import Callable, Sequence
from typing import Any

from kernels_pallas.aot import TARGETS, TPU_TOPOLOGIES
from kernels_pallas.report.gpu import compile_report_gpu
from kernels_pallas.report.tpu import compile_report_tpu


def compile_report(fn: Callable, args: Sequence[Any], target: str, donate: Sequence[int] = ()) -> dict:
    """Compiles `fn(*args)` ahead of time.

    Args:
      fn: traced with the target as its platform, so that ops choose their implementations for it. For a TPU
        it is sent to a process of its own and must be picklable: a module's function, or a
        `functools.partial` of one.
      args: arrays or `jax.ShapeDtypeStruct`s, in trees.
      target: of `kernels_pallas.aot.TARGETS`.
      donate: which arguments are donated.

    Returns:
      A dict of `argument_bytes`, `alias_bytes` (of outputs that are in a donated buffer), `temp_bytes`,
      `copies` (shapes that the program copies; None where it cannot be printed) and `kernels`, dicts that
      `compile_report_tpu` and `compile_report_gpu` describe.

    Raises:
      ValueError: an unknown target.
      RuntimeError: the program does not compile, or for a GPU `ptxas` is not installed.
      NotImplementedError: an implementation that was named cannot do this call.
    """
    if target in TPU_TOPOLOGIES:
        return compile_report_tpu(fn, args, donate, target)
    if target in TARGETS:
        return compile_report_gpu(fn, args, donate, target)
    raise ValueError(f"Unknown target {target!r}; there are {', '.join(TARGETS)}.")
