"""C99 that the functions of several operators share: structures of constants, and helper functions."""

from __future__ import annotations

import re
from string import Template

from smelt.runtime.integer.shift_ops import SQRT_ITERATIONS

HELPERS = """\
/* Shift right, rounding toward minus infinity; 63 and more leave the sign. */
static int64_t shift_right(int64_t x, int64_t bits)
{
    if (bits > 63) {
        bits = 63;
    }
    return x < 0 ? ~(~x >> bits) : x >> bits;
}

static int64_t power_of_two(int64_t bits)
{
    return (int64_t)((uint64_t)1 << bits);
}

/* Shift right, rounding half up. */
static int64_t round_shift(int64_t x, int64_t bits)
{
    return bits > 0 ? shift_right(x + power_of_two(bits - 1), bits) : x;
}

/* Divide by a positive number, rounding toward minus infinity. */
static int64_t floor_divide(int64_t x, int64_t divisor)
{
    int64_t quotient = x / divisor;
    return x % divisor < 0 ? quotient - 1 : quotient;
}

static int64_t clamp(int64_t x, int64_t minimum, int64_t maximum)
{
    return x < minimum ? minimum : x > maximum ? maximum : x;
}

static int64_t magnitude(int64_t x)
{
    return x < 0 ? -x : x;
}

/* Map the index of an element of a tensor of RANK axes to an offset in another one, by that one's strides. */
static size_t strided(size_t index, const uint32_t *shape, const uint32_t *stride)
{
    size_t offset = 0;
    int axis;
    for (axis = RANK - 1; axis >= 0; axis--) {
        offset += index % shape[axis] * stride[axis];
        index /= shape[axis];
    }
    return offset;
}

static int64_t exponential(int64_t x, const exp_constants *c)
{
    int64_t halvings, rest;
    x = x < -c->max_halvings * c->q_ln2 ? -c->max_halvings * c->q_ln2 : x;
    halvings = -x / c->q_ln2;
    rest = x + halvings * c->q_ln2;
    return shift_right((rest * (rest + c->q_b) + c->q_c) * power_of_two(c->lift), c->drop + halvings);
}

/* Two to the power of (x + x / 2 - x / 16) / q_one, linear between powers of two. */
static int64_t shift_exponential(int64_t x, const shift_exp_constants *c)
{
    int64_t halvings, rest;
    x += shift_right(x, 1) - shift_right(x, 4);
    x = x < -c->max_halvings * c->q_one ? -c->max_halvings * c->q_one : x;
    halvings = -x / c->q_one;
    rest = x + halvings * c->q_one;
    return shift_right((shift_right(rest, 1) + c->q_one) * power_of_two(c->lift), c->drop + halvings);
}

static int64_t square_root(int64_t x)
{
    int64_t root = 1, smaller;
    int bits;
    if (x <= 0) {
        return 0;
    }
    for (bits = 1; bits < 32; bits++) {
        if (x >> (2 * bits - 2)) {
            root = power_of_two(bits);
        }
    }
    for (;;) {
        smaller = (root + x / root) >> 1;
        if (smaller >= root) {
            return root;
        }
        root = smaller;
    }
}

static int64_t floor_log2(int64_t x)
{
    int64_t exponent = 0;
    while (x >>= 1) {
        exponent++;
    }
    return exponent;
}

/* The square root by a fixed number of iterations: its floor, or one more. */
static int64_t shift_square_root(int64_t x)
{
    int64_t root;
    int i;
    if (x <= 0) {
        return 0;
    }
    root = power_of_two((floor_log2(x) + 1) >> 1);
    for (i = 0; i < $sqrt_iterations; i++) {
        root = (root + x / root) >> 1;
    }
    return root;
}

static int64_t look_up(int64_t x, const table_constants *t)
{
    uint32_t low = 0, high = t->entries - 1, middle;
    while (low < high) {
        middle = (low + high) / 2;
        if (t->breakpoints[middle] <= x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return t->slopes[low] * x + t->intercepts[low];
}

/* Shift left, or right by negative bits. */
static int64_t shift_left(int64_t x, int64_t bits)
{
    return bits >= 0 ? x * power_of_two(bits) : shift_right(x, -bits);
}
"""

STRUCTURES = """\
typedef struct {
    int64_t q_ln2, q_b, q_c, max_halvings, lift, drop;
} exp_constants;

typedef struct {
    int64_t q_one, max_halvings, lift, drop;
} shift_exp_constants;

typedef struct {
    uint32_t entries;
    const int32_t *breakpoints, *slopes;
    const int64_t *intercepts;
} table_constants;

typedef struct {
    uint32_t batch, in, height, width, out, out_height, out_width, groups, group_in, kernel_height, kernel_width;
    uint32_t stride_height, stride_width, padding_height, padding_width, dilation_height, dilation_width;
} convolution;

typedef struct {
    uint32_t planes, height, width, out_height, out_width, kernel_height, kernel_width, stride_height, stride_width;
} pool;
"""


def used_helpers(kernels: str) -> str:
    """Return the helpers that the kernels call, directly or through each other; an unused function is a warning."""
    blocks = [block for block in re.split(r"\n(?=static |/\*)", "\n" + HELPERS) if block.strip()]
    helpers: list[tuple[str, str]] = []
    comment = ""
    for block in blocks:
        if block.startswith("/*"):
            comment = block + "\n"
            continue
        match = re.match(r"static \w+ (\w+)\(", block.strip())
        assert match is not None
        helpers.append((match[1], comment + block.strip() + "\n"))
        comment = ""
    needed, text = [], kernels
    for name, block in reversed(helpers):  # a helper calls only helpers before it
        if re.search(rf"\b{name}\(", text):
            needed.append(block)
            text += block
    return Template("\n".join(reversed(needed))).substitute(sqrt_iterations=SQRT_ITERATIONS)
