"""Matrix products of different shapes in one launch: persistent programs walk over the tiles of all of them.

An operand is a matrix in memory by strides, or the patches of an image, which are too: where patch t begins and where
pixel k of a patch lies add up, so that no copy is made (no im2col).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from mmplan.kernels.dispatch import interpreted, jit, launch, persistent_programs, tl
from mmplan.kernels.tuning import product_tile

_FIELDS = 18  # numbers that describe a product, in the order of `_row`
_BAND = 8  # rows of tiles that neighbouring programs share, so that their operands are in the L2 cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A matrix [rows, columns]. Of patches: rows are tokens and columns pixels; `turned` swaps the two."""

    data: Tensor
    rows: int
    columns: int
    patch: int = 0
    turned: bool = False

    @staticmethod
    def of(matrix: Tensor) -> "Operand":
        """Copies a matrix only if neither of its strides is 1."""
        matrix = matrix if 1 in matrix.stride() else matrix.contiguous()
        return Operand(data=matrix, rows=matrix.shape[0], columns=matrix.shape[1])

    @staticmethod
    def of_patches(image: Tensor, patch: int) -> "Operand":
        b, c, h, w = image.shape
        return Operand(data=image, rows=b * (h // patch) * (w // patch), columns=c * patch**2, patch=patch)

    def transposed(self) -> "Operand":
        data = self.data if self.patch else self.data.T
        return Operand(data=data, rows=self.columns, columns=self.rows, patch=self.patch, turned=not self.turned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """c [m, n] = a [m, k] @ b [k, n] + bias [n], summed in fp32. Of b and c no patches; c is written."""

    a: Operand
    b: Operand
    c: Tensor
    bias: Tensor | None = None


@jit
@no_type_check
def _token_offset(token, image_stride, height_stride, width_stride, across, per_image, patch):
    """Where a patch begins."""
    inside = token % per_image
    line = (inside // across).to(tl.int64) * height_stride + (inside % across).to(tl.int64) * width_stride
    return (token // per_image).to(tl.int64) * image_stride + line * patch


@jit
@no_type_check
def _pixel_offset(pixel, channel_stride, height_stride, width_stride, patch):
    """Where a pixel lies from the beginning of its patch."""
    inside = pixel % (patch * patch)
    line = (inside // patch).to(tl.int64) * height_stride + (inside % patch).to(tl.int64) * width_stride
    return (pixel // (patch * patch)).to(tl.int64) * channel_stride + line


@jit
@no_type_check
def _lines(index, stride, INNER: tl.constexpr):
    """Offsets along an axis; one known to be contiguous is loaded in vectors."""
    return index.to(tl.int64) if INNER else index * stride


@jit
@no_type_check
def _aligned(number, VECTOR: tl.constexpr):
    """The number, shown to the compiler to be a multiple of VECTOR, as the caller has checked. (`tl.multiple_of` marks
    the value wherever it is used, in the patches' branch too, where it need not be one.)"""
    return number // VECTOR * VECTOR


@jit
@no_type_check
def _products_kernel(
    table_ptr,
    typed_ptr,
    groups,
    FIELDS: tl.constexpr,
    PATCHED: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    C_INNER: tl.constexpr,
    VECTOR: tl.constexpr,
    C_VECTOR: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """X_INNER: the axis (0 or 1) along which all operands x are contiguous, or -1. VECTOR: elements of 16 bytes if all
    that is dense is aligned to them, else 1; C_VECTOR: if every c is. 16 bits are multiplied as they are and summed in
    fp32, which loses nothing; the interpreter, whose product of bf16 is wrong, gets fp32 (UPCAST). fp32 is multiplied
    as three products of tf32 (PRECISION), to an error of about fp32's own, unless torch may use one."""
    pointer = tl.pointer_type(typed_ptr.dtype.element_ty)
    tile = tl.program_id(0)
    first = 0
    for group in range(groups):
        field = table_ptr + group * FIELDS
        m = tl.load(field + 4).to(tl.int32)
        n = tl.load(field + 5).to(tl.int32)
        k = tl.load(field + 6).to(tl.int32)
        down = tl.cdiv(m, M)
        across = tl.cdiv(n, N)
        while tile < first + down * across:
            a_row_stride = tl.load(field + 7)
            a_column_stride = tl.load(field + 8)
            b_row_stride = tl.load(field + 9)
            b_column_stride = tl.load(field + 10)

            # Bands of BAND rows of tiles, each walked column by column.
            local = tile - first
            band = local // (BAND * across) * BAND
            height = tl.minimum(down - band, BAND)
            row = (band + local % (BAND * across) % height) * M + tl.arange(0, M)
            column = local % (BAND * across) // height * N + tl.arange(0, N)
            depth = tl.arange(0, K)
            total = tl.zeros((M, N), tl.float32)
            patch = tl.load(field + 13).to(tl.int32) if PATCHED else 0
            if patch > 0:
                height_stride = tl.load(field + 14)
                width_stride = tl.load(field + 15)
                grid_width = tl.load(field + 16).to(tl.int32)
                per_image = tl.load(field + 17).to(tl.int32)
                a_ptr = tl.load(field).to(pointer)
                b_ptrs = (
                    tl.load(field + 1).to(pointer)
                    + (depth * b_row_stride)[:, None]
                    + (column * b_column_stride)[None, :]
                )
                for start in range(0, k, K):
                    token = start + depth if TURNED else row
                    pixel = row if TURNED else start + depth
                    tokens = _token_offset(
                        token, a_row_stride, height_stride, width_stride, grid_width, per_image, patch
                    )
                    pixels = _pixel_offset(pixel, a_column_stride, height_stride, width_stride, patch)
                    offsets = pixels[:, None] + tokens[None, :] if TURNED else tokens[:, None] + pixels[None, :]
                    mask = (row < m)[:, None] & (start + depth < k)[None, :]
                    a = tl.load(a_ptr + offsets, mask=mask, other=0.0)
                    b = tl.load(b_ptrs, mask=(start + depth < k)[:, None] & (column < n)[None, :], other=0.0)
                    if UPCAST:
                        a, b = a.to(tl.float32), b.to(tl.float32)
                    total = tl.dot(a, b, total, input_precision=PRECISION)
                    b_ptrs += K * b_row_stride
            else:
                a_ptr = tl.multiple_of(tl.load(field).to(pointer), 16 if VECTOR > 1 else 1)
                b_ptr = tl.multiple_of(tl.load(field + 1).to(pointer), 16 if VECTOR > 1 else 1)
                rows = _aligned(m, VECTOR)
                columns = _aligned(n, VECTOR)
                deep = _aligned(k, VECTOR)
                a_row_stride = _aligned(a_row_stride, VECTOR)
                a_column_stride = _aligned(a_column_stride, VECTOR)
                b_row_stride = _aligned(b_row_stride, VECTOR)
                b_column_stride = _aligned(b_column_stride, VECTOR)
                b_ptrs = b_ptr + _lines(depth, b_row_stride, B_INNER == 0)[:, None]
                b_ptrs += _lines(column, b_column_stride, B_INNER == 1)[None, :]
                b_step = K if B_INNER == 0 else K * b_row_stride
                a_ptrs = a_ptr + _lines(row, a_row_stride, A_INNER == 0)[:, None]
                a_ptrs += _lines(depth, a_column_stride, A_INNER == 1)[None, :]
                a_step = K if A_INNER == 1 else K * a_column_stride
                for start in range(0, k, K):
                    a = tl.load(a_ptrs, mask=(row < rows)[:, None] & (start + depth < deep)[None, :], other=0.0)
                    b = tl.load(b_ptrs, mask=(start + depth < deep)[:, None] & (column < columns)[None, :], other=0.0)
                    if UPCAST:
                        a, b = a.to(tl.float32), b.to(tl.float32)
                    total = tl.dot(a, b, total, input_precision=PRECISION)
                    a_ptrs += a_step
                    b_ptrs += b_step
            if HAS_BIAS:
                bias_ptr = tl.load(field + 3)
                present = tl.where(bias_ptr == 0, 0, n)
                total += tl.load(bias_ptr.to(pointer) + column, mask=column < present, other=0.0).to(tl.float32)[
                    None, :
                ]
            c_ptr = tl.multiple_of(tl.load(field + 2).to(pointer), 16 if C_VECTOR > 1 else 1)
            offsets = _lines(row, _aligned(tl.load(field + 11), C_VECTOR), C_INNER == 0)[:, None]
            offsets += _lines(column, _aligned(tl.load(field + 12), C_VECTOR), C_INNER == 1)[None, :]
            inside = (row < _aligned(m, C_VECTOR))[:, None] & (column < _aligned(n, C_VECTOR))[None, :]
            tl.store(c_ptr + offsets, total, mask=inside)
            tile += tl.num_programs(0)
        first += down * across


def grouped_product(products: Sequence[Product]) -> None:
    """Writes every c. All operands are of one dtype on one device."""
    products = [product for product in products if product.c.numel()]
    if not products:
        return
    device, dtype = products[0].c.device, products[0].c.dtype
    patched = any(product.a.patch for product in products)
    tile = product_tile(device, dtype.itemsize, patched)
    biases = [None if p.bias is None else p.bias.to(dtype).contiguous() for p in products]  # alive until the launch
    rows = [_row(product, bias) for product, bias in zip(products, biases, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    tiles = sum(-(-product.a.rows // tile.m) * -(-product.b.columns // tile.n) for product in products)
    # `allow_tf32` is refused by torch where the newer `fp32_precision` was set; that follows both.
    full_precision = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    launch(
        *(_products_kernel, (persistent_programs(device, tiles, per_multiprocessor=1),)),
        *(table, products[0].c, len(products), _FIELDS),
        *(patched, products[0].a.turned, any(bias is not None for bias in biases)),
        *(_inner([p.a.data for p in products if not p.a.patch]), _inner([p.b.data for p in products if not p.a.patch])),
        *(_inner([p.c for p in products]), _vector([m for p in products for m in _dense(p)], dtype)),
        *(_vector([p.c for p in products], dtype), interpreted(), "tf32x3" if full_precision else "tf32"),
        *(_BAND, tile.m, tile.n, tile.k),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _row(product: Product, bias: Tensor | None) -> list[int]:
    a, b, c = product.a, product.b, product.c
    head = [a.data.data_ptr(), b.data.data_ptr(), c.data_ptr(), 0 if bias is None else bias.data_ptr()]
    head += [a.rows, b.columns, a.columns]
    if not a.patch:
        return [*head, *a.data.stride(), *b.data.stride(), *c.stride(), 0, 0, 0, 0, 0]
    of_image, of_channel, of_height, of_width = a.data.stride()
    across = a.data.shape[3] // a.patch
    tail = [a.patch, of_height, of_width, across, across * (a.data.shape[2] // a.patch)]
    return [*head, of_image, of_channel, *b.data.stride(), *c.stride(), *tail]


def _inner(matrices: Sequence[Tensor]) -> int:
    """The axis along which all are contiguous; -1 if there is none."""
    return next((axis for axis in (1, 0) if all(matrix.stride(axis) == 1 for matrix in matrices)), -1)


def _dense(product: Product) -> list[Tensor]:
    return [] if product.a.patch else [product.a.data, product.b.data]


def _vector(matrices: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Elements of 16 bytes, if every pointer, stride and side of the matrices is a multiple of them; else 1."""
    vector = 16 // dtype.itemsize
    sizes = [size for matrix in matrices for size in (*matrix.shape, *matrix.stride()) if size != 1]
    aligned = all(size % vector == 0 for size in sizes) and all(matrix.data_ptr() % 16 == 0 for matrix in matrices)
    return vector if aligned else 1
