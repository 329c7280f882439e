"""Dot products and cosines of rows, bit-identical on every processor: one numba kernel, emitted as LLVM IR.

A compiler that may reorder floating-point additions uses the processor's vector width, so the order differs between
processors; one that may not adds the numbers one by one. Here the order is fixed at 16 lanes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from draftstore.jit import intrinsic, leaf_kernel

LANES = 16
"""Number of partial sums in a dot product."""


def _as_numbers(builder: Any, codes: Any, code: Any) -> Any:
    """Emit the conversion of codes to float32: from float32, float16 bits, or int8; scalar or vector."""
    if isinstance(code, types.Float):
        return codes
    many = isinstance(codes.type, ir.VectorType)

    def like(kind: Any, value: Any = None) -> Any:
        wide = ir.VectorType(kind, LANES) if many else kind
        return wide if value is None else wide([value] * LANES if many else value)

    if code.bitwidth == 8:
        return builder.sitofp(codes, like(ir.FloatType()))
    whole = ir.IntType(32)
    # Not all processors have an instruction for float16, and numba has no fallback function.
    bits = builder.shl(builder.sext(codes, like(whole)), like(whole, 13))
    bits = builder.and_(bits, like(whole, ~0x70000000))
    return builder.fmul(builder.bitcast(bits, like(ir.FloatType())), like(ir.FloatType(), 2.0**112))


@intrinsic
def _sums(_context: Any, vectors: Any, row: Any, query: Any) -> Any:
    """Return two float32: dot product of a row of vectors and a query; the row's sum of squares, for int8 only.

    Lane j of 16 sums the elements j, j + 16, j + 32, ...; then the upper half of the lanes is added to the lower half,
    four times; then the remaining elements after the last 16 are added one by one. No operations are fused.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = signature.args[0].dtype
        rows, wanted = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2))
        dims = builder.extract_value(rows.shape, 1)
        row = context.cast(builder, arguments[1], signature.args[1], types.intp)
        codes = builder.gep(rows.data, [builder.mul(row, dims)])

        def load(pointer: Any, place: Any, lanes: int) -> Any:
            pointer = builder.gep(pointer, [place])
            if lanes > 1:
                several = ir.VectorType(pointer.type.pointee, lanes)
                pointer = builder.bitcast(pointer, several.as_pointer())
            return builder.load(pointer, align=1)

        def add_products(sums: Sequence[Any], place: Any, lanes: int) -> None:
            numbers = _as_numbers(builder, load(codes, place, lanes), code)
            for total, factors in zip(sums, (load(wanted.data, place, lanes), numbers), strict=False):
                builder.store(builder.fadd(builder.load(total), builder.fmul(numbers, factors)), total)

        many, one = ir.VectorType(ir.FloatType(), LANES), ir.FloatType()
        count = 2 if code == types.int8 else 1
        sums = [cgutils.alloca_once_value(builder, many([0.0] * LANES)) for _ in range(count)]
        whole = builder.and_(dims, dims.type(-LANES))
        with cgutils.for_range_slice(builder, dims.type(0), whole, dims.type(LANES)) as (place, _):
            add_products(sums, place, LANES)
        totals = [cgutils.alloca_once_value(builder, _fold(builder, builder.load(lanes))) for lanes in sums]
        with cgutils.for_range_slice(builder, whole, dims, dims.type(1)) as (place, _):
            add_products(totals, place, 1)
        found = [builder.load(total) for total in totals]
        return context.make_tuple(builder, signature.return_type, [*found, one(0.0)][:2])

    return types.UniTuple(types.float32, 2)(vectors, row, query), generate


def _fold(builder: Any, lanes: Any) -> Any:
    """Emit the sum of all lanes: the upper half is added to the lower until one is left."""
    size = LANES
    while size > 1:
        size //= 2
        halves = (
            ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(start, start + size)])
            for start in (0, size)
        )
        lanes = builder.fadd(*(builder.shuffle_vector(lanes, lanes, half) for half in halves))
    return builder.extract_element(lanes, ir.IntType(32)(0))


@leaf_kernel
def dot(vectors: Any, row: Any, query: Any) -> Any:
    """Return the dot product of a row of vectors and a query."""
    return _sums(vectors, row, query)[0]


@leaf_kernel
def cosine(vectors: Any, row: Any, query: Any) -> Any:
    """Return the cosine of a row of vectors and a query of unit length."""
    product, squares = _sums(vectors, row, query)
    return product / np.sqrt(squares) if squares > 0.0 else product
