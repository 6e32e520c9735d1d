"""Functions of float32 blocks in few instructions, as text that stands behind a kernel's.

An epilogue runs while tensor cores wait. Triton's erf is 28 instructions an element on sm_90, half
of which choose constants; here it is 16. Its sigmoid is 12, and here it is 4: a reciprocal and a
power of two by one instruction each, which take subnormal numbers for zero. Results are within some
units of float32's last place, and within one of what 16 bits hold.
"""

from __future__ import annotations

import textwrap

ERF, SIGMOID = "tunerd_erf", "tunerd_sigmoid"

# x * P(x^2) / Q(x^2) for |x| <= 4, beyond which erf is 1 in float32: relative error 3.4e-7. The
# coefficients are those of Eigen's generic_fast_erf_float, which XLA and TVM's fast_erf have, too.
_OVER = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_UNDER = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip
_LOG2_E = 1.4426950408889634


def _instruction(name: str, of: str) -> str:
    """Return the text of an instruction of PTX on each element."""
    return (
        f'tl.inline_asm_elementwise("{name} $0, $1;", "=f,f", [{of}], dtype=tl.float32,'
        " is_pure=True, pack=1)"
    )


def _polynomial(coefficients: tuple[float, ...], of: str) -> str:
    text = repr(coefficients[0])
    for each in coefficients[1:]:
        text = f"({text} * {of} + {each!r})"
    return text


_TEXTS = {
    ERF: f"""
        def {ERF}(x):
            near = tl.clamp(x, -4.0, 4.0, propagate_nan=tl.PropagateNan.ALL)
            square = near * near
            over = {_polynomial(_OVER, "square")}
            under = {_polynomial(_UNDER, "square")}
            return near * over * {_instruction("rcp.approx.ftz.f32", "under")}
        """,
    SIGMOID: f"""
        def {SIGMOID}(x):
            power = {_instruction("ex2.approx.ftz.f32", f"x * {-_LOG2_E!r}")}
            return {_instruction("rcp.approx.ftz.f32", "1.0 + power")}
        """,
}


def called_by(text: str) -> str:
    """Return the text of the functions that a kernel's text calls."""
    found = (textwrap.dedent(own).lstrip() for name, own in _TEXTS.items() if f"{name}(" in text)
    return "".join(found)
