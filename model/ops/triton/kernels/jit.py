"""The decorator of all kernels."""

import inspect

import triton


def kernel(function):
    """`triton.jit`, specialised on nothing that a launch may change: one binary for every bucket and every layer."""
    names = [
        name for name, parameter in inspect.signature(function).parameters.items() if not is_constant(name, parameter)
    ]
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if not name.endswith(("_ptr", "_tab"))],
        do_not_specialize_on_alignment=[name for name in names if name.endswith("_tab")],
    )


def is_constant(name, parameter):
    """Whether a parameter is known when the kernel is compiled."""
    constant = parameter.annotation is triton.language.constexpr
    assert constant == name.isupper(), f"{name}: capitals are for compile-time constants"
    return constant
