from __future__ import annotations

import pytest
import torch

from kernels.custom import ArgumentError, SignatureError
from kernels.custom.signature import parse_signature, signature_of
from kernels.custom.source import DeclaredKernel, parse_parameter

NORM = (
    "const bfloat16 x[*rows, 2*inner], const float w[inner, 4], bfloat16 y[inner, *rows], int rows, float eps, int64 k"
)


def declared(*parameters: str) -> DeclaredKernel:
    return DeclaredKernel("own", tuple(map(parse_parameter, parameters)))


def test_what_it_reads() -> None:
    signature = parse_signature(NORM.replace("[inner, *rows]", "[*rows, inner]"))
    assert [one.name for one in signature.inputs] == ["x", "w"]
    assert [one.name for one in signature.given] == ["eps", "k"]
    assert signature.schema == "(Tensor x, Tensor w, float eps, int k) -> Tensor"
    sizes = signature.bind([torch.empty(2, 3, 10, dtype=torch.bfloat16), torch.empty(5, 4)])
    assert sizes == {"rows": (2, 3), "inner": (5,)}
    assert signature.output_shapes(sizes) == [(2, 3, 5)]
    assert signature.numbers(sizes, (0.5, 7)) == {"rows": 6, "eps": 0.5, "k": 7}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (NORM, r"'\*rows' in '.*' is no dimension"),
        ("const float x[n], float y[m]", r"no tensor that is read has m, a dimension of float y\[m\]"),
        ("float x[n], float y[n]", "a tensor that is read"),
        ("const float x[n]", "one that is filled"),
        ("const float x[n], float x[n]", "a name of its own"),
        ("const real x[n], float y[n]", "'const real x' has no type that is known"),
        ("const float* x, float y[n]", r"is a tensor: write its shape"),
        ("const float x[n-1], float y[n]", "'n-1' in .* is no dimension"),
        ("const float x[n]], float y[n]", "can't be read from"),
    ],
)
def test_what_it_refuses(text: str, error: str) -> None:
    with pytest.raises(SignatureError, match=error):
        parse_signature(text)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        (("const float* x", "float* y"), "takes 2 parameters, and the signature has 3"),
        (("const float* x", "float* y", "float n"), "parameter 2 of own is 'float n', and 'int n' in the signature"),
        (
            ("const float* x", "const float* y", "int n"),
            r"parameter 1 of own is 'const float\* y', and 'float y\[\*n\]'",
        ),
        (("const half* x", "float* y", "int n"), "parameter 0 of own is 'const half"),
        (("const float x", "float* y", "int n"), "parameter 0 of own is"),
    ],
)
def test_another_than_the_kernels(parameters: tuple[str, ...], error: str) -> None:
    signature = parse_signature("const float x[*n], float y[*n], int n")
    signature.check_declared(declared("const float* a", "real* b", "int c"))
    with pytest.raises(SignatureError, match=error):
        signature.check_declared(declared(*parameters))


def test_a_layout_has_gaps_where_c_has_them() -> None:
    signature = parse_signature("const float x[*n], int a, double b, bool c, float y[*n]")
    signature.check_layout("own", [(0, 8), (8, 4), (16, 8), (24, 1), (32, 8)])
    with pytest.raises(SignatureError, match="compiled own"):
        signature.check_layout("own", [(0, 8), (8, 4), (12, 8), (20, 1), (24, 8)])


def test_that_of_a_kernel_over_elements_is_told_by_its_declaration() -> None:
    assert str(signature_of(declared("const half* x", "half* y", "size_t count"))) == (
        "const __half x[*count], __half y[*count], size_t count"
    )
    for other in (
        ("const float* x", "float* y", "float a"),
        ("const float* x", "half* y", "int n"),
        ("const float* x", "const float* w", "float* y", "int n"),
    ):
        with pytest.raises(SignatureError, match=r"give CustomOp\(..., signature='const float x\[...\], "):
            signature_of(declared(*other))


def test_numbers_that_dont_fit() -> None:
    signature = parse_signature("const float x[*n], float y[*n], int8 n, float a, uint8 b")
    sizes = signature.bind([torch.empty(100)])
    assert signature.numbers(sizes, (float("inf"), 255)) == {"n": 100, "a": float("inf"), "b": 255}
    with pytest.raises(ArgumentError, match="n=200 doesn't fit into signed char"):
        signature.numbers(signature.bind([torch.empty(2, 100)]), (0.0, 0))
    with pytest.raises(ArgumentError, match="a=1e\\+39 doesn't fit into float"):
        signature.numbers(sizes, (1e39, 0))
    with pytest.raises(ArgumentError, match="b=-1 doesn't fit"):
        signature.numbers(sizes, (0.0, -1))
