"""The operators of an integer graph as C99 functions, each equal to its reference in `runtime/integer/ops.py`.

`$X_type`, `$Z_type` and `$Y_type` stand for the types of the first input, the second one and the output; a function is
written once per combination that a graph uses. Right shifts of negative values are implementation-defined in C and left
shifts undefined, so both are written as portable functions.
"""

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

KERNELS = {
    "linear": """\
void $name(const $X_type *x, $Y_type *y, const int8_t *weight, const int32_t *bias, size_t rows, size_t in, size_t out)
{
    size_t row, column, i;
    for (row = 0; row < rows; row++) {
        for (column = 0; column < out; column++) {
            int32_t sum = bias ? bias[column] : 0;
            for (i = 0; i < in; i++) {
                sum += (int32_t)x[row * in + i] * weight[column * in + i];
            }
            y[row * out + column] = ($Y_type)sum;
        }
    }
}
""",
    "matmul": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t batch, size_t m, size_t k, size_t n, size_t b_row,
           size_t b_column)
{
    size_t index, row, column, i;
    for (index = 0; index < batch; index++) {
        for (row = 0; row < m; row++) {
            for (column = 0; column < n; column++) {
                int32_t sum = 0;
                for (i = 0; i < k; i++) {
                    sum += (int32_t)a[(index * m + row) * k + i]
                           * b[index * k * n + i * b_row + column * b_column];
                }
                y[(index * m + row) * n + column] = ($Y_type)sum;
            }
        }
    }
}
""",
    "convolution": """\
void $name(const $X_type *x, $Y_type *y, const int8_t *weight, const int32_t *bias, const convolution *c)
{
    uint32_t image, channel, row, column, i, k, l;
    for (image = 0; image < c->batch; image++) {
        for (channel = 0; channel < c->out; channel++) {
            uint32_t first = channel / (c->out / c->groups) * c->group_in;
            for (row = 0; row < c->out_height; row++) {
                for (column = 0; column < c->out_width; column++) {
                    int32_t sum = bias ? bias[channel] : 0;
                    for (i = 0; i < c->group_in; i++) {
                        for (k = 0; k < c->kernel_height; k++) {
                            uint32_t in_row = row * c->stride_height + k * c->dilation_height;
                            if (in_row < c->padding_height || in_row >= c->height + c->padding_height) {
                                continue;
                            }
                            for (l = 0; l < c->kernel_width; l++) {
                                uint32_t in_column = column * c->stride_width + l * c->dilation_width;
                                if (in_column < c->padding_width || in_column >= c->width + c->padding_width) {
                                    continue;
                                }
                                sum += (int32_t)x[(((size_t)image * c->in + first + i) * c->height + in_row
                                              - c->padding_height) * c->width
                                           + in_column - c->padding_width]
                                       * weight[(((size_t)channel * c->group_in + i) * c->kernel_height + k)
                                                * c->kernel_width + l];
                            }
                        }
                    }
                    *y++ = ($Y_type)sum;
                }
            }
        }
    }
}
""",
    "embedding": """\
int $name(const $X_type *x, $Y_type *y, const $T_type *table, size_t count, size_t rows, size_t width)
{
    size_t index, i;
    for (index = 0; index < count; index++) {
        int64_t id = x[index];
        if (id < 0 || id >= (int64_t)rows) {
            return 1;
        }
        for (i = 0; i < width; i++) {
            y[index * width + i] = ($Y_type)table[(size_t)id * width + i];
        }
    }
    return 0;
}
""",
    "requantize": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *multiplier, const int32_t *shift, size_t outer, size_t channels,
           size_t inner, int64_t minimum, int64_t maximum)
{
    size_t row, channel, i;
    for (row = 0; row < outer; row++) {
        for (channel = 0; channel < channels; channel++) {
            for (i = 0; i < inner; i++) {
                int64_t product = (int64_t)*x++ * multiplier[channel];
                *y++ = ($Y_type)clamp(round_shift(product, shift[channel]), minimum, maximum);
            }
        }
    }
}
""",
    "add": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t count, const uint32_t *shape,
           const uint32_t *a_stride, const uint32_t *b_stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)((int64_t)a[strided(i, shape, a_stride)]
                                    + b[strided(i, shape, b_stride)]);
    }
}
""",
    "gelu": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t q_b, int64_t q_c, int64_t q_one, int64_t shift)
{
    size_t i;
    for (i = 0; i < count; i++) {
        int64_t value = x[i], distance = q_b - clamp(magnitude(value), 0, q_b);
        int64_t erf = value == 0 ? 0 : q_c - distance * distance;
        y[i] = ($Y_type)(value * (shift_right(value < 0 ? -erf : erf, shift) + q_one));
    }
}
""",
    "gelu_shift": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t sigmoid_bits, const shift_exp_constants *c)
{
    size_t i;
    int64_t one = shift_exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], scaled = value + shift_right(value, 1) + shift_right(value, 3) + shift_right(value, 4);
        int64_t exp = shift_exponential(-magnitude(scaled), c);
        y[i] = ($Y_type)(value * ((scaled < 0 ? exp : one) * power_of_two(sigmoid_bits) / (one + exp)));
    }
}
""",
    "tanh": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t levels, const exp_constants *c)
{
    size_t i;
    int64_t one = exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], exp = exponential(-magnitude(value), c);
        int64_t result = (2 * levels * (one - exp) + one + exp) / (2 * (one + exp));
        y[i] = ($Y_type)(value < 0 ? -result : value > 0 ? result : 0);
    }
}
""",
    "table": """\
void $name(const $X_type *x, $Y_type *y, size_t count, const table_constants *table)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)look_up(x[i], table);
    }
}
""",
    "sqrt": """\
void $name(const $X_type *x, $Y_type *y, size_t count)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)square_root(x[i]);
    }
}
""",
    "softmax": """\
void $name(const $X_type *x, $mask_parameters$Y_type *y, size_t rows, size_t length, int64_t levels,
           int64_t reciprocal_bits, const $constants *c)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t peak = INT32_MIN, sum = 0, factor;
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible && x[index] > peak) {
                peak = x[index];
            }
        }
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible) {
                sum += $exponential(x[index] - peak, c);
            }
        }
        factor = levels * power_of_two(reciprocal_bits) / (sum < 1 ? 1 : sum);
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            int64_t exp = $visible ? $exponential(x[index] - peak, c) : 0;
            y[index] = ($Y_type)round_shift(exp * factor, reciprocal_bits);
        }
    }
}
""",
    "softmax_table": """\
static int64_t ${name}_exp(int64_t x, int64_t lowest, int64_t exp_bits, int64_t exp_shift, const table_constants *exp)
{
    return clamp(round_shift(look_up(clamp(x, lowest, 0), exp), exp_shift), 0, power_of_two(exp_bits));
}

void $name(const $X_type *x, $mask_parameters$Y_type *y, size_t rows, size_t length, int64_t levels,
           int64_t lowest, int64_t exp_bits, int64_t exp_shift, const table_constants *exp,
           const table_constants *reciprocal)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t peak = INT32_MIN, sum = 0, factor, exponent;
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible && x[index] > peak) {
                peak = x[index];
            }
        }
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible) {
                sum += ${name}_exp(x[index] - peak, lowest, exp_bits, exp_shift, exp);
            }
        }
        sum = sum < 1 ? 1 : sum;
        exponent = floor_log2(sum);
        factor = levels * look_up(shift_left(sum, $reciprocal_input_bits - exponent), reciprocal);
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            int64_t value = $visible ? ${name}_exp(x[index] - peak, lowest, exp_bits, exp_shift, exp) : 0;
            y[index] = ($Y_type)clamp(round_shift(value * factor, $result_bits + exponent), 0, levels);
        }
    }
}
""",
    "norm": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *weight, const int32_t *bias, size_t rows, size_t length,
           int64_t epsilon, int64_t shift, int64_t reciprocal_bits, int64_t output_bits)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t mean = 0, sum = epsilon, root, factor;
        if (bias) {
            for (i = 0; i < length; i++) {
                mean += x[row * length + i];
            }
            mean = floor_divide(2 * mean + (int64_t)length, 2 * (int64_t)length);
        }
        for (i = 0; i < length; i++) {
            int64_t value = shift_right(x[row * length + i] - mean, shift);
            sum += value * value;
        }
        root = $root(sum) * power_of_two(shift);
        factor = power_of_two(reciprocal_bits) / (root < 1 ? 1 : root);
        for (i = 0; i < length; i++) {
            int64_t value = (x[row * length + i] - mean) * factor;
            value = round_shift(value, reciprocal_bits - output_bits) * weight[i] + (bias ? bias[i] : 0);
            y[row * length + i] = ($Y_type)value;
        }
    }
}
""",
    "norm_table": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *weight, const int32_t *bias, size_t rows, size_t length,
           int64_t epsilon, int64_t shift, int64_t output_bits, const table_constants *rsqrt)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t mean = 0, sum = epsilon, exponent, factor;
        if (bias) {
            for (i = 0; i < length; i++) {
                mean += x[row * length + i];
            }
            mean = floor_divide(2 * mean + (int64_t)length, 2 * (int64_t)length);
        }
        for (i = 0; i < length; i++) {
            int64_t value = shift_right(x[row * length + i] - mean, shift);
            sum += value * value;
        }
        sum = sum < 1 ? 1 : sum;
        exponent = floor_log2(sum) / 2;
        factor = look_up(shift_left(sum, $rsqrt_input_bits - 2 * exponent), rsqrt);
        for (i = 0; i < length; i++) {
            int64_t value = (x[row * length + i] - mean) * factor;
            value = round_shift(value, $result_bits + exponent + shift - output_bits) * weight[i];
            value += bias ? bias[i] : 0;
            y[row * length + i] = ($Y_type)value;
        }
    }
}
""",
    "mean": """\
void $name(const $X_type *x, $Y_type *y, size_t outer, size_t length, size_t inner)
{
    size_t row, i, k;
    for (row = 0; row < outer; row++) {
        for (k = 0; k < inner; k++) {
            int64_t sum = 0;
            for (i = 0; i < length; i++) {
                sum += x[(row * length + i) * inner + k];
            }
            y[row * inner + k] = ($Y_type)sum;
        }
    }
}
""",
    "masked_mean": """\
void $name(const $X_type *x, const $Z_type *mask, $Y_type *y, size_t batch, size_t tokens, size_t width)
{
    size_t row, i, k;
    for (row = 0; row < batch; row++) {
        for (k = 0; k < width; k++) {
            int64_t sum = 0, count = 0;
            for (i = 0; i < tokens; i++) {
                if (mask[row * tokens + i] != 0) {
                    sum += x[(row * tokens + i) * width + k];
                    count++;
                }
            }
            count = count < 1 ? 1 : count;
            y[row * width + k] = ($Y_type)floor_divide(2 * sum + count, 2 * count);
        }
    }
}
""",
    "pool": """\
void $name(const $X_type *x, $Y_type *y, const pool *p)
{
    uint32_t plane, row, column, k, l;
    for (plane = 0; plane < p->planes; plane++) {
        for (row = 0; row < p->out_height; row++) {
            for (column = 0; column < p->out_width; column++) {
                const $X_type *corner = x + ((size_t)plane * p->height + row * p->stride_height) * p->width
                                + column * p->stride_width;
                int64_t result = $initial;
                for (k = 0; k < p->kernel_height; k++) {
                    for (l = 0; l < p->kernel_width; l++) {
                        int64_t value = corner[(size_t)k * p->width + l];
                        $update
                    }
                }
                *y++ = ($Y_type)result;
            }
        }
    }
}
""",
    "argmax": """\
void $name(const $X_type *x, $Y_type *y, size_t outer, size_t length, size_t inner)
{
    size_t row, i, k;
    for (row = 0; row < outer; row++) {
        for (k = 0; k < inner; k++) {
            size_t best = 0;
            for (i = 1; i < length; i++) {
                if (x[(row * length + i) * inner + k] > x[(row * length + best) * inner + k]) {
                    best = i;
                }
            }
            y[row * inner + k] = ($Y_type)best;
        }
    }
}
""",
    "positions": """\
void $name(const $X_type *x, $Y_type *y, size_t batch, size_t tokens, int64_t padding_index)
{
    size_t row, i;
    for (row = 0; row < batch; row++) {
        int64_t count = 0;
        for (i = 0; i < tokens; i++) {
            int64_t visible = padding_index < 0 || x[row * tokens + i] != padding_index;
            count += visible;
            *y++ = ($Y_type)(padding_index < 0 ? (int64_t)i : count * visible + padding_index);
        }
    }
}
""",
    "add_positions": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *table, size_t batch, size_t patches, size_t tokens,
           size_t width)
{
    size_t row, i, before = (tokens - patches) * width;
    for (row = 0; row < batch; row++) {
        for (i = 0; i < tokens * width; i++) {
            int64_t value = i < before ? 0 : x[row * patches * width + i - before];
            *y++ = ($Y_type)(value + table[i]);
        }
    }
}
""",
    "relative_bias": """\
void $name(const $X_type *x, $Y_type *y, const $T_type *table, size_t batch, size_t heads, size_t queries, size_t keys,
           size_t columns)
{
    size_t index, head, query, key;
    for (index = 0; index < batch; index++) {
        for (head = 0; head < heads; head++) {
            for (query = 0; query < queries; query++) {
                for (key = 0; key < keys; key++) {
                    int64_t bias = table[head * columns + columns / 2 + key - query];
                    *y++ = ($Y_type)(*x++ + bias);
                }
            }
        }
    }
}
""",
    "copy": """\
void $name(const $X_type *x, $Y_type *y, size_t count, const uint32_t *shape, const uint32_t *stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)x[strided(i, shape, stride)];
    }
}
""",
}
