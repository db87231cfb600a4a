"""Operators of a C export for the positions of tokens: embeddings of positions, RoPE, and causal masks."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.c.writer import MEMBERS, SourceWriter
from smelt.runtime.integer.graph import Node, dtype_name

KERNELS = {
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


def _positions(writer: SourceWriter, node: Node) -> str:
    (ids,) = node.inputs
    batch, tokens = writer.shapes[ids]
    arguments = f"{writer.place(ids)}, {writer.place(node.output)}, {batch}, {tokens}, {integer(node, 'padding_index')}"
    return f"{writer.function('positions', node)}({arguments});"


def _add_positions(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    batch, patches, width = writer.shapes[x]
    arguments = f"{writer.place(x)}, {writer.place(node.output)}, {writer.constant(node, 'table', 'int32')}"
    sizes = f"{batch}, {patches}, {node.constants['table'].shape[0]}, {width}"
    return f"{writer.function('add_positions', node)}({arguments}, {sizes});"


def _relative_bias(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    table = node.constants["table"]
    dtype = dtype_name(table)
    name = writer.function("relative_bias", node, suffix=MEMBERS[dtype], T_type=f"{dtype}_t")
    sizes = f"{', '.join(map(str, writer.shapes[x]))}, {table.shape[1]}"
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {writer.constant(node, 'table', dtype)}, {sizes});"


def _rope(writer: SourceWriter, node: Node) -> str:
    batch, tokens, heads, width = writer.shapes[node.inputs[0]]
    places = ", ".join(writer.place(name) for name in (*node.inputs, node.output))
    return f"{writer.function('rope', node)}({places}, {batch * tokens}, {heads}, {width // 2});"


def _causal_mask(writer: SourceWriter, node: Node) -> str:
    mask, ids = node.inputs
    (batch, keys), queries = writer.shapes[mask], writer.shapes[ids][1]
    sizes = f"{batch}, {integer(node, 'repeats')}, {queries}, {keys}"
    return f"{writer.function('causal_mask', node)}({writer.place(mask)}, {writer.place(node.output)}, {sizes});"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "positions": _positions,
    "add_positions": _add_positions,
    "relative_bias": _relative_bias,
    "rope": _rope,
    "causal_mask": _causal_mask,
}
