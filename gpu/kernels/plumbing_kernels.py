"""The plumbing of a step as kernels: page changes, gathers by row and position, tokens kept."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def put_pages_kernel(pages, index, value, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + i, mask=i < count, other=0)
    tl.store(pages + place, tl.load(value + i, mask=i < count), mask=i < count)


@triton.jit(do_not_specialize=["tokens", "requests", "stride"])
def select_kernel(
    token_ids, positions, rows, last_tokens, cos, sin, pages, cos_out, sin_out, pages_out, tokens,
    requests, stride,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid: a program for each token, then one for each request of each page group, whose tables
    lie `stride` rows behind those of the group before.
    """
    t = tl.program_id(0)
    if t < tokens:
        if tl.load(token_ids + t) < 0:
            tl.store(
                token_ids + t, tl.load(last_tokens + tl.load(rows + tl.minimum(t, requests - 1)))
            )
        h = tl.arange(0, BLOCK_H)
        source = tl.load(positions + t).to(tl.int64) * HALF + h
        target = t.to(tl.int64) * HALF + h
        tl.store(cos_out + target, tl.load(cos + source, mask=h < HALF), mask=h < HALF)
        tl.store(sin_out + target, tl.load(sin + source, mask=h < HALF), mask=h < HALF)
    else:
        request = t - tokens
        group = request // requests
        row = (tl.load(rows + request % requests) + group * stride).to(tl.int64)
        for start in range(0, WIDTH, BLOCK_W):
            p = start + tl.arange(0, BLOCK_W)
            tl.store(
                pages_out + request.to(tl.int64) * WIDTH + p,
                tl.load(pages + row * WIDTH + p, mask=p < WIDTH),
                mask=p < WIDTH,
            )


@triton.jit
def _entry(table, out, r, entry, place, WIDTH: tl.constexpr):
    """Row r of `out` [row WIDTH] is an entry of the table, or -1 where it is none."""
    own = tl.load(
        table + entry.to(tl.int64) * WIDTH + place, mask=(place < WIDTH) & (entry >= 0), other=-1
    )
    tl.store(out + r.to(tl.int64) * WIDTH + place, own, mask=place < WIDTH)


@triton.jit(do_not_specialize=["length"])
def processors_kernel(
    rows, pending, history_row, bias_row, mask_row, new_column, new_token, last_tokens, histories,
    bias_ids, bias, masks, ids_out, bias_out, masks_out, last_out, length,
    BIASES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (request, block of entries). Histories are `length` long."""
    r, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    _entry(masks, masks_out, r, tl.load(mask_row + r), place, WORDS)
    if block * BLOCK < BIASES:
        of_bias = tl.load(bias_row + r)
        _entry(bias_ids, ids_out, r, of_bias, place, BIASES)
        _entry(bias, bias_out, r, of_bias, place, BIASES)
    if block == 0:
        row = tl.load(history_row + r)
        column = tl.load(new_column + r)
        is_new = (row >= 0) & (column >= 0) & (column < length)
        target = row.to(tl.int64) * length + column
        tl.store(histories + target, tl.load(new_token + r), mask=is_new)
        known = (tl.load(pending + r) > 0) & (row >= 0)
        last = tl.load(last_tokens + tl.load(rows + r), mask=known, other=-1)
        tl.store(last_out + r, last)


@triton.jit(do_not_specialize=["count"])
def keep_kernel(sampled, sample_rows, last_tokens, tokens, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(sampled + i, mask=i < count)
    row = tl.load(sample_rows + i, mask=i < count, other=0)
    tl.store(last_tokens + row, tl.maximum(token, 0), mask=i < count)
    tl.store(tokens + i, token, mask=i < count)


@triton.jit(do_not_specialize=["requests", "stride"])
def advance_kernel(
    counts, rows, token_ids, positions, kv_lens, position, slots, pages, requests, stride,
    PAGE_SIZES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PAGE_SIZES: those of all groups as one number, 32 bits for each from the lowest on. A
    start notes launches as text, from which a tuple comes back as a list: another kernel.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < tl.load(counts + 1)
    place = tl.load(positions + i, mask=live, other=0) + 1
    tl.store(positions + i, place, mask=live)
    tl.store(kv_lens + i, tl.load(kv_lens + i, mask=live) + 1, mask=live)
    tl.store(position + i, tl.load(position + i, mask=live) + 1, mask=live)
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    for group in tl.static_range(GROUPS):
        page_size = (PAGE_SIZES >> (32 * group)) & 0xFFFFFFFF
        entry = (row + group * stride) * WIDTH + place // page_size
        page = tl.load(pages + entry, mask=live, other=0)
        slot = page * page_size + place % page_size
        tl.store(slots + group * requests + i, slot, mask=live)
    tl.store(token_ids + i, tl.full([BLOCK], -1, tl.int32), mask=live)
