"""The sampler and the scores of CODA, without sorting the vocabulary.

Tokens are ordered by their final logit, ties by id. A logit becomes an integer that is ordered as logits are, and its
probability relative to the largest becomes an integer multiple of 2^-44: sums of those are exact in any order. Every
filter keeps the first tokens of the order, so it is a bound on their mass, and the draw asks for the first token up to
which the mass reaches a number. Both are found digit by digit over the integers of logits, in 16 passes over the
vocabulary.
"""

import triton
import triton.language as tl

from wavegraph.model.ops.triton.kernels.jit import kernel

# One, in units of the sampler's masses. 2^18 tokens of this mass fit 64 bits.
ONE = tl.constexpr(float(1 << 44))


@triton.jit
def _real(params, column):
    """A float among a request's parameters."""
    return tl.load(params + column).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(x):
    """Integers ordered as ``x`` float32; of both zeros and of every NaN there is one, the latter below all numbers."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """The float32 that an integer was made of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@kernel
def count_tokens(
    counts_ptr, token_tab, params_tab, left_tab, coda_slot_tab, coda_pos_tab, token_width,
    VOCAB: tl.constexpr, PARAMS: tl.constexpr, PROMPT_LEN: tl.constexpr, REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How a row's history counts: bit 0 says that a token occurs, the rest how often it does in the output.

    Program (row, i) takes BLOCK positions; ``counts [rows, VOCAB]`` int32 is zero before. Rows without penalties, or
    that draw nothing, are left alone.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(coda_slot_tab + row).to(tl.int64)
    params = params_tab + slot * PARAMS
    penalised = (_real(params, REPETITION) != 1.0) | (_real(params, PRESENCE) != 0.0)
    penalised = penalised | (_real(params, FREQUENCY) != 0.0)
    if penalised & (tl.load(left_tab + row) == 1):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        known = place <= tl.load(coda_pos_tab + row)
        token = tl.load(token_tab + slot * token_width + place, mask=known, other=0)
        known = known & (token >= 0) & (token < VOCAB)
        counts = counts_ptr + row * VOCAB + token
        tl.atomic_or(counts, 1, mask=known)
        tl.atomic_add(counts, 2, mask=known & (place >= tl.load(params + PROMPT_LEN)))


@kernel
def order_logits(
    order_ptr, top_ptr, logits_ptr, counts_ptr, params_tab, left_tab, coda_slot_tab, coda_pos_tab,
    VOCAB: tl.constexpr, PARAMS: tl.constexpr, PROMPT_LEN: tl.constexpr, MIN_TOKENS: tl.constexpr,
    STOP_COUNT: tl.constexpr, BIAS_COUNT: tl.constexpr, REPETITION: tl.constexpr, PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr, STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr, BIAS_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties, bias and bans; ``order [rows, VOCAB]`` of what comes out, and the largest of each row, int32.

    Program (row, i) takes BLOCK tokens; ``top [rows]`` holds the least integer before. Rows that draw nothing are left
    alone.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(left_tab + row) == 1:
        params = params_tab + tl.load(coda_slot_tab + row).to(tl.int64) * PARAMS
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < VOCAB
        x = tl.load(logits_ptr + row * VOCAB + column, mask=inside, other=float("-inf")).to(tl.float32)
        count = tl.load(counts_ptr + row * VOCAB + column, mask=inside, other=0)
        repetition = tl.full([BLOCK], 1.0, tl.float32) * _real(params, REPETITION)
        scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(count > 0, scaled, x)
        times = (count >> 1).to(tl.float32)
        x = x - _real(params, FREQUENCY) * times
        x = x - _real(params, PRESENCE) * (times > 0).to(tl.float32)
        for index in tl.range(0, tl.load(params + BIAS_COUNT)):
            x = tl.where(column == tl.load(params + BIAS_IDS + index), x + _real(params, BIAS_VALUES + index), x)
        outputs = tl.load(coda_pos_tab + row) + 1 - tl.load(params + PROMPT_LEN)
        if outputs < tl.load(params + MIN_TOKENS):
            for index in tl.range(0, tl.load(params + STOP_COUNT)):
                x = tl.where(column == tl.load(params + STOP_IDS + index), float("-inf"), x)
        order = _ordered(x)
        tl.store(order_ptr + row * VOCAB + column, order, mask=inside)
        tl.atomic_max(top_ptr + row, tl.max(order, 0))


@kernel
def weigh(
    weight_ptr, order_ptr, top_ptr, params_tab, left_tab, coda_slot_tab,
    VOCAB: tl.constexpr, PARAMS: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``weight [rows, VOCAB]`` int64: exp of a token's distance to the largest over the temperature.

    Program (row, i) takes BLOCK tokens. Rows that draw nothing, or the largest, are left alone.
    """
    row = tl.program_id(0).to(tl.int64)
    params = params_tab + tl.load(coda_slot_tab + row).to(tl.int64) * PARAMS
    temperature = _real(params, TEMPERATURE)
    if (tl.load(left_tab + row) == 1) & (temperature > 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < VOCAB
        top = tl.load(top_ptr + row)
        order = tl.where(inside, tl.load(order_ptr + row * VOCAB + column, mask=inside, other=0), top)
        # The largest may be infinite: its distance from itself is zero all the same.
        x = tl.where(order == top, 0.0, _unordered(order)).to(tl.float64)
        distance = tl.where(order == top, 0.0, x - _unordered(top).to(tl.float64))
        share = tl.exp(distance / temperature.to(tl.float64))
        tl.store(weight_ptr + row * VOCAB + column, (share * ONE).to(tl.int64), mask=inside)


@triton.jit
def _bound(order_ptr, weight_ptr, wanted, counting, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest integer such that tokens whose order is not below it weigh ``wanted``: two bits a pass.

    All tokens together must weigh as much; with ``counting`` each weighs 1.
    """
    low = tl.full([], -(1 << 31), tl.int64)
    for step in tl.range(0, 16):
        bounds = low + (tl.arange(0, 4).to(tl.int64) << (30 - 2 * step))
        acc = tl.zeros([4, BLOCK], tl.int64)
        for start in tl.range(0, VOCAB, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < VOCAB
            order = tl.load(order_ptr + column, mask=inside, other=0).to(tl.int64)
            weight = tl.load(weight_ptr + column, mask=inside, other=0)
            weight = tl.where(counting, inside.to(tl.int64), weight)
            acc += tl.where(order[None, :] >= bounds[:, None], weight[None, :], 0)
        reached = tl.sum((tl.sum(acc, 1) >= wanted).to(tl.int64), 0)
        low += (reached - 1) << (30 - 2 * step)
    return low


@triton.jit
def _mass(weight_ptr, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of all tokens of at least a weight."""
    acc = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + column, mask=column < VOCAB, other=0)
        acc += tl.where(weight >= least, weight, 0)
    return tl.sum(acc, 0)


@triton.jit
def _token(order_ptr, bound, place, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The token of an order at a place, counted from 1, among those of its order."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for start in tl.range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        tie = inside & (tl.load(order_ptr + column, mask=inside, other=0).to(tl.int64) == bound)
        number = seen + tl.cumsum(tie.to(tl.int64), 0)
        token += tl.sum(tl.where(tie & (number == place), column, 0), 0)
        seen += tl.sum(tie.to(tl.int64), 0)
    return token


@triton.jit
def _uniform(params, position, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr):
    """The number in [0, 1) that decides the token of a position, float64."""
    low = tl.load(params + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(params + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    words = tl.philox((high << 32) | low, position, 0, 0, 0)
    return (words[0] >> 8).to(tl.float64) * (1.0 / (1 << 24))


@kernel
def pick(
    order_ptr, weight_ptr, top_ptr, token_out_tab, token_tab, params_tab, left_tab, coda_slot_tab, coda_pos_tab,
    token_width,
    VOCAB: tl.constexpr, PARAMS: tl.constexpr, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr, TOP_K: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a row's token, report and store it; -1, and nothing stored, for a row that stays.

    What a filter keeps are the first tokens, so their mass says which: that of the shortest of the three. The token
    itself is the first up to which the mass exceeds the uniform number times the mass kept.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(left_tab + row) == 1:
        slot = tl.load(coda_slot_tab + row).to(tl.int64)
        pos = tl.load(coda_pos_tab + row)
        params = params_tab + slot * PARAMS
        order = order_ptr + row * VOCAB
        weight = weight_ptr + row * VOCAB
        bound = tl.load(top_ptr + row).to(tl.int64)
        place = tl.full([], 1, tl.int64)  # of the token among those of its order
        if _real(params, TEMPERATURE) > 0:
            top_k = tl.load(params + TOP_K).to(tl.int64)
            top_p = _real(params, TOP_P)
            kept = _mass(weight, 0, VOCAB, BLOCK)
            wanted = top_k
            for stage in tl.range(0, 3):  # top-k by count, top-p by mass, the draw
                if stage == 1:
                    wanted = tl.ceil(top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
                if stage == 2:
                    least = tl.ceil(_real(params, MIN_P).to(tl.float64) * ONE).to(tl.int64)
                    kept = tl.minimum(kept, _mass(weight, least, VOCAB, BLOCK))
                    share = _uniform(params, pos + 1, SEED_LOW, SEED_HIGH)
                    wanted = (share * kept.to(tl.float64)).to(tl.int64) + 1
                if (stage == 2) | ((stage == 1) & (top_p < 1)) | ((stage == 0) & (top_k > 0) & (top_k < VOCAB)):
                    bound = _bound(order, weight, wanted, stage == 0, VOCAB, BLOCK)
                    above = tl.zeros([BLOCK], tl.int64)
                    level = tl.zeros([BLOCK], tl.int64)
                    above_count = tl.zeros([BLOCK], tl.int64)
                    level_count = tl.zeros([BLOCK], tl.int64)
                    for start in tl.range(0, VOCAB, BLOCK):
                        column = start + tl.arange(0, BLOCK)
                        inside = column < VOCAB
                        at = tl.load(order + column, mask=inside, other=0).to(tl.int64)
                        w = tl.load(weight + column, mask=inside, other=0)
                        above += tl.where(inside & (at > bound), w, 0)
                        level += tl.where(inside & (at == bound), w, 0)
                        above_count += (inside & (at > bound)).to(tl.int64)
                        level_count += (inside & (at == bound)).to(tl.int64)
                    each = tl.sum(level, 0) // tl.sum(level_count, 0)  # tokens of one order weigh the same
                    mass = tl.sum(above, 0)
                    if stage == 0:  # noqa: SIM108 - a ternary would divide by zero in the stage that does not divide
                        place = wanted - tl.sum(above_count, 0)
                    else:
                        place = (wanted - mass + each - 1) // each
                    kept = tl.minimum(kept, mass + place * each)
        token = _token(order, bound, place, VOCAB, BLOCK)
        tl.store(token_out_tab + row, token)
        tl.store(token_tab + slot * token_width + pos + 1, token)
    else:
        tl.store(token_out_tab + row, -1)


@kernel
def score(
    logprob_tab, rank_tab, top_ids_tab, top_logprobs_tab, logits_ptr, token_out_tab, token_tab, coda_slot_tab,
    coda_pos_tab, coda_action_tab, token_width, scratch_slot,
    VOCAB: tl.constexpr, TOP: tl.constexpr, SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-probability and rank of the token drawn or known to follow, and the TOP likeliest tokens of a row.

    Padding is left alone.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(coda_slot_tab + row)
    if slot != scratch_slot:
        logits = logits_ptr + row * VOCAB
        after = slot.to(tl.int64) * token_width + tl.load(coda_pos_tab + row) + 1
        follows = tl.load(coda_action_tab + row) == SCORE
        token = tl.where(follows, tl.load(token_tab + after), tl.load(token_out_tab + row))
        token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
        own = tl.load(logits + token).to(tl.float32)
        best = tl.full([], float("-inf"), tl.float32)
        higher = tl.full([], 0, tl.int32)
        for start in tl.range(0, VOCAB, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, tl.max(x, 0))
            higher += tl.sum((x > own).to(tl.int32), 0)
        total = tl.full([], 0.0, tl.float32)
        for start in tl.range(0, VOCAB, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
            total += tl.sum(tl.exp(x - best), 0)
        scale = best + tl.log(total)
        tl.store(logprob_tab + row, own - scale)
        tl.store(rank_tab + row, higher)
        # Distinct integers in the order of logits, ties by id; each round takes the largest below the last.
        last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for index in tl.range(0, TOP):
            found = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
            for start in tl.range(0, VOCAB, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
                key = _ordered(x).to(tl.int64) * (1 << 32) + (VOCAB - 1 - column)
                key = tl.where((column < VOCAB) & (key < last), key, -0x7FFFFFFFFFFFFFFF)
                found = tl.maximum(found, tl.max(key, 0))
            last = found
            chosen = VOCAB - 1 - (found & 0xFFFFFFFF).to(tl.int32)
            tl.store(top_ids_tab + row * TOP + index, chosen)
            tl.store(top_logprobs_tab + row * TOP + index, tl.load(logits + chosen).to(tl.float32) - scale)
