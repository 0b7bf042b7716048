"""A rival on CUDA devices: the grouped merge as one would write it in Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _merge(
    table, first_tiles, num_tiles, scaling,
    BASE: tl.constexpr, PAIR: tl.constexpr, OUT: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """table: [num, 6] int64: base, lora_A, lora_B, out, rows, cols, all contiguous; first_tiles: [num + 1]. Persistent."""
    tile = tl.program_id(0)
    matrix = 0
    while tile < num_tiles:
        while tl.load(first_tiles + matrix + 1) <= tile:
            matrix += 1
        entry = table + matrix * 6
        base = tl.load(entry).to(tl.pointer_type(BASE))
        lora_A = tl.load(entry + 1).to(tl.pointer_type(PAIR))
        lora_B = tl.load(entry + 2).to(tl.pointer_type(PAIR))
        out = tl.load(entry + 3).to(tl.pointer_type(OUT))
        rows, cols = tl.load(entry + 4), tl.load(entry + 5)
        local = tile - tl.load(first_tiles + matrix)
        across = tl.cdiv(cols, COLS)
        row = local // across * ROWS + tl.arange(0, ROWS)
        col = local % across * COLS + tl.arange(0, COLS)
        rank = tl.arange(0, RANK)
        B = tl.load(lora_B + row[:, None] * RANK + rank[None, :], mask=row[:, None] < rows, other=0.0)
        A = tl.load(lora_A + rank[:, None] * cols + col[None, :], mask=col[None, :] < cols, other=0.0)
        inside = (row[:, None] < rows) & (col[None, :] < cols)
        where = row[:, None] * cols + col[None, :]
        W = tl.load(base + where, mask=inside, other=0.0).to(tl.float32)
        merged = W + scaling * tl.dot(B, A, input_precision=PRECISION)
        tl.store(out + where, merged.to(OUT), mask=inside)
        tile += tl.num_programs(0)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonMerge:
    """One launch over a list of (base, lora_A, lora_B, out), all contiguous and of one kind."""

    def __init__(self, group, scaling: float, *, rows: int = 64, cols: int = 128) -> None:
        base, lora_A, _, some_out = group[0]
        entries, first, tiles = [], [], 0
        for W, A, B, out in group:
            entries.append([W.data_ptr(), A.data_ptr(), B.data_ptr(), out.data_ptr(), *W.shape])
            first.append(tiles)
            tiles += triton.cdiv(W.shape[0], rows) * triton.cdiv(W.shape[1], cols)
        self._keep = group
        self._args = (
            torch.tensor(entries, device=base.device),
            torch.tensor([*first, tiles], device=base.device, dtype=torch.int32),
            tiles,
            scaling,
        )
        self._kinds = (_TYPES[base.dtype], _TYPES[lora_A.dtype], _TYPES[some_out.dtype], lora_A.shape[0], rows, cols)
        # As exact as ours: three TF32 products for float32 operands.
        self._precision = "tf32x3" if lora_A.dtype == torch.float32 else "tf32"
        count = torch.cuda.get_device_properties(base.device).multi_processor_count if base.is_cuda else 1
        self._grid = (min(tiles, 4 * count),)

    def __call__(self) -> None:
        _merge[self._grid](*self._args, *self._kinds, self._precision)
