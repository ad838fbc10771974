// exp of a vector: the same steps on every instruction set.
#pragma once

namespace headrace::HEADRACE_ISA {

// e^x = 2^n * e^r with n = round(x / ln 2) and r in [-ln2/2, ln2/2]; e^r is a polynomial of degree 6. The error stays
// below 2 units in the last place; -inf gives 0, above 88.73 comes inf, a NaN stays one.
HEADRACE_INLINE F exp(F x) {
    x = min(set1(89.0f), max(set1(-105.0f), x)); // x second: max and min hand on their second operand if there is a NaN
    F n = round(mul(x, set1(1.44269504f)));
    F r = fma(n, set1(-0.693359375f), x); // ln 2 in two parts, the first exact in n * part
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return scale_by_power(p, n);
}

// x / (1 + e^-x)
HEADRACE_INLINE F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

} // namespace headrace::HEADRACE_ISA
