"""The operators that only decoders have as C99 functions, as those in `c_kernels.py`."""

DECODER_KERNELS = {
    "multiply": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t count, const uint32_t *shape,
           const uint32_t *a_stride, const uint32_t *b_stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)((int64_t)a[strided(i, shape, a_stride)]
                                    * b[strided(i, shape, b_stride)]);
    }
}
""",
    "rope": """\
void $name(const $X_type *x, const $Z_type *cosine, const $Z_type *sine, $Y_type *y, size_t tokens, size_t heads,
           size_t half)
{
    size_t token, head, i;
    for (token = 0; token < tokens; token++) {
        for (head = 0; head < heads; head++) {
            for (i = 0; i < half; i++) {
                int64_t first = x[i], second = x[half + i], c = cosine[i], s = sine[i];
                y[i] = ($Y_type)(first * c - second * s);
                y[half + i] = ($Y_type)(second * c + first * s);
            }
            x += 2 * half;
            y += 2 * half;
        }
        cosine += half;
        sine += half;
    }
}
""",
    "silu": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t bits, const exp_constants *c)
{
    size_t i;
    int64_t one = exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], exp = exponential(-magnitude(value), c);
        y[i] = ($Y_type)(value * ((value < 0 ? exp : one) * power_of_two(bits) / (one + exp)));
    }
}
""",
    "concat": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t outer, size_t a_inner, size_t b_inner)
{
    size_t row, i;
    for (row = 0; row < outer; row++) {
        for (i = 0; i < a_inner; i++) {
            *y++ = ($Y_type)*a++;
        }
        for (i = 0; i < b_inner; i++) {
            *y++ = ($Y_type)*b++;
        }
    }
}
""",
    "causal_mask": """\
void $name(const $X_type *mask, $Y_type *y, size_t batch, size_t repeats, size_t queries, size_t keys)
{
    size_t row, repeat, query, key;
    for (row = 0; row < batch; row++) {
        for (repeat = 0; repeat < repeats; repeat++) {
            for (query = 0; query < queries; query++) {
                for (key = 0; key < keys; key++) {
                    *y++ = ($Y_type)(key + queries <= query + keys && mask[row * keys + key] != 0);
                }
            }
        }
    }
}
""",
}
