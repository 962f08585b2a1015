"""From a noted operator call to something that can be called again and again, into the same storage."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from wavegraph.capture.backends.tape import Call

Bind = Callable[[Any], Any]
"""Turns a `TensorRef` (or a list of them) into the tensor at that place; other values stay as they are."""

# What converts or copies is one copy into the output; torch has no such `out` form.
_COPIES = {"aten::_to_copy", "aten::clone"}
# Value of the output, or the position of the argument that holds it.
_CONSTANT_FILLS = {"aten::zeros_like": 0, "aten::ones_like": 1, "aten::new_zeros": 0, "aten::new_ones": 1}
_ARGUMENT_FILLS = {"aten::full_like": 1, "aten::new_full": 2}
# Options of a factory that its output already has.
_TENSOR_OPTIONS = {"dtype", "layout", "device", "pin_memory"}


def lower(call: Call, bind: Bind) -> Callable[[], object]:
    """A callable without arguments that repeats ``call`` and leaves its outputs where they were recorded.

    Calls that change their arguments are repeated as they are. Others go through the operator's ``out`` form
    if it has one with equal arguments, else their results are copied over.
    """
    args = tuple(bind(value) for value in call.args)
    kwargs = {key: bind(value) for key, value in call.kwargs.items()}
    outputs = tuple(bind(value) for value in call.outputs)
    made = [output for output in outputs if output is not None]
    if not made:
        return partial(call.op, *args, **kwargs)
    name = call.op._schema.name
    if name in _COPIES:
        return partial(torch.ops.aten.copy_.default, made[0], args[0])
    if name in _CONSTANT_FILLS:
        return partial(torch.ops.aten.fill_.Scalar, made[0], _CONSTANT_FILLS[name])
    if name in _ARGUMENT_FILLS:
        return partial(torch.ops.aten.fill_.Scalar, made[0], args[_ARGUMENT_FILLS[name]])
    form = _out_form(call.op)
    if form is not None and len(made) == len(outputs) == len(form[1]):
        op, names, dropped = form
        kept = {key: value for key, value in kwargs.items() if key not in dropped}
        return partial(op, *args, **kept, **dict(zip(names, made, strict=True)))
    return partial(_run_and_copy, call.op, args, kwargs, outputs)


def _run_and_copy(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor | None]
) -> None:
    result = op(*args, **kwargs)
    values = [result] if isinstance(result, Tensor) else [v for v in _flat(result) if isinstance(v, Tensor)]
    for output, value in zip(outputs, values, strict=True):
        if output is not None:
            output.copy_(value)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]


@cache
def _out_form(op: OpOverload) -> tuple[OpOverload, tuple[str, ...], frozenset[str]] | None:
    """The overload of ``op`` that writes given outputs, their names, and the keywords it does not take."""
    if op._schema.is_mutable:
        return None
    arguments = op._schema.arguments
    is_factory = not any("Tensor" in str(argument.type) for argument in arguments)
    dropped = frozenset(_TENSOR_OPTIONS) if is_factory else frozenset()
    wanted = [(a.name, str(a.type)) for a in arguments if a.name not in dropped]
    packet = op.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        outs = [a for a in candidate._schema.arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        if outs and given == wanted and all(str(a.type) == "Tensor" for a in outs):
            return candidate, tuple(a.name for a in outs), dropped
    return None
