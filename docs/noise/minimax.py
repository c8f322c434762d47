"""Minimax polynomials behind crates/core/src/noise/log.rs and math.rs (needs mpmath).

Each one minimises the relative error of the whole function, by Remez exchange in 40 digits; the coefficients are then
rounded to float32; the leading terms of each function are exact by construction, so the rounding costs little.
Prints coefficients, lowest power first, and the relative error of the rounded polynomial in exact arithmetic.
"""
import struct
from mpmath import mp, mpf, log1p, exp, tanh, sqrt, matrix, lu_solve, expm1

mp.dps = 40
f32 = lambda x: mpf(struct.unpack("f", struct.pack("f", float(x)))[0])


def remez(target, weight, lo, hi, n, rounds=8):
    """Coefficients c minimising max |(target - sum c_i x^i) * weight| on [lo, hi]."""
    from mpmath import cos, pi
    xs = [(lo + hi) / 2 + (hi - lo) / 2 * cos(pi * (2 * i + 1) / (2 * (n + 1))) for i in range(n + 1)][::-1]
    for _ in range(rounds):
        a = matrix(n + 1, n + 1)
        b = matrix(n + 1, 1)
        for r, x in enumerate(xs):
            for c in range(n):
                a[r, c] = x ** c
            a[r, n] = (-1) ** r / weight(x)
            b[r] = target(x)
        s = lu_solve(a, b)
        coef = [s[i] for i in range(n)]
        err = lambda x: (target(x) - sum(c * x ** i for i, c in enumerate(coef))) * weight(x)
        grid = [lo + (hi - lo) * i / 1000 for i in range(1001)]
        vals = [err(x) for x in grid]
        ext = [0] + [i for i in range(1, 1000) if (vals[i] - vals[i - 1]) * (vals[i + 1] - vals[i]) <= 0] + [1000]
        best = []
        for i in ext:
            if best and (vals[i] > 0) == (vals[best[-1]] > 0):
                if abs(vals[i]) > abs(vals[best[-1]]):
                    best[-1] = i
            else:
                best.append(i)
        while len(best) > n + 1:
            best.pop(0 if abs(vals[best[0]]) < abs(vals[best[-1]]) else -1)
        if len(best) < n + 1:
            break
        xs = [grid[i] for i in best]
    return coef, max(abs(v) for v in vals)


def rounded(target, weight, lo, hi, n):
    coef, _ = remez(target, weight, lo, hi, n)
    fixed = [f32(c) for c in coef]
    grid = [lo + (hi - lo) * (i + mpf(1) / 3) / 3000 for i in range(3000)]
    return fixed, max(abs((target(x) - sum(c * x ** i for i, c in enumerate(fixed))) * weight(x)) for x in grid)


def show(name, target, weight, lo, hi, n):
    _, ideal = remez(target, weight, lo, hi, n)
    c, e = rounded(target, weight, lo, hi, n)
    print(name, "ideal", mp.nstr(ideal, 4), "rounded", mp.nstr(e, 4), "= 2^", mp.nstr(mp.log(e, 2), 5))
    for v in c:
        print("   %-18.10e 0x%08x" % (float(v), struct.unpack("I", struct.pack("f", float(v)))[0]))


def guarded(f, x, series):
    return series(x) if abs(x) < mpf(10) ** -8 else f(x)


import sys
if __name__ == "__main__":
    lo, hi = sqrt(mpf(1) / 2) - 1, sqrt(mpf(2)) - 1
    # ln(1+f) = f - f^2/2 + f^3 q(f)
    q = lambda f: guarded(lambda f: (log1p(f) - f + f * f / 2) / f ** 3, f, lambda f: mpf(1) / 3 - f / 4)
    wt = lambda f: abs(f ** 3 / log1p(f)) if abs(f) > mpf(10) ** -15 else mpf(10) ** -25
    for n in (7, 8):
        show("log n=%d" % n, q, lambda f: wt(f) + mpf(10) ** -12, lo, hi, n)
    h = mp.log(2) / 2
    # e^r = 1 + r + r^2 p(r)
    p = lambda r: guarded(lambda r: (exp(r) - 1 - r) / r ** 2, r, lambda r: mpf(1) / 2 + r / 6)
    for n in (4, 5):
        show("exp n=%d" % n, p, lambda r: r ** 2 / exp(r) + mpf(10) ** -12, -h, h, n)
    show("exp eighth n=3", p, lambda r: r ** 2 / exp(r) + mpf(10) ** -12, mpf(0), mpf(1) / 8, 3)
    # tanh(x) = x + x^3 t(x^2), x in [0, 0.625]
    t = lambda z: guarded(lambda z: (tanh(sqrt(z)) / sqrt(z) - 1) / z, z, lambda z: -mpf(1) / 3 + 2 * z / 15)
    for n in (5,):
        show("tanh n=%d" % n, t, lambda z: z * sqrt(z) / tanh(sqrt(z)) + mpf(10) ** -12 if z > 0 else mpf(10) ** -12, mpf(0), mpf("0.625") ** 2, n)
