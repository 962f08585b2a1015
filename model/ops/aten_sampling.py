"""What CODA does after the language head, in ATen operators. `wavegraph.model.sampling` says what is computed.

A row's bits depend on the row alone, whatever its place, its neighbours and the number of rows and threads. So what
rounds here is either an operator that works row by row (softmax, cumsum) or correctly rounded elementwise
arithmetic. Elementwise functions (exp, sigmoid) are avoided: on a CPU their last bit depends on an element's place.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, Action, Column

# Most logits worked on at once: bounds temporary memory, whatever the bucket.
_BLOCK_LIMIT = 1 << 20

_WORD = 0xFFFFFFFF


class AtenSampling:
    """The part of `wavegraph.model.ops.base.Ops` that CODA runs after the language head. It needs no scratch."""

    def scratch_size(self, io: StepIO, pools: Pools, work: Workspace) -> int:
        """None."""
        return 0

    def leave(self, io: StepIO, pools: Pools, rows: int) -> None:
        """Action and gate decide. Each sigmoid is computed in float64, then rounded to float32."""
        request = _Rows(io, slice(0, rows))
        gates = pools.gate[pages_of(io, pools, request.slot, request.pos), request.pos % pools.page_size]
        depths = gates.shape[1]
        depth = io.coda_depth[:rows]
        ran = torch.arange(depths, device=gates.device) <= depth.unsqueeze(1)
        logits = torch.where(ran, gates, -torch.inf).double()
        lam = torch.softmax(torch.stack((logits, torch.zeros_like(logits)), dim=2), dim=2)[:, :, 0].float()
        stayed, mass = torch.ones_like(lam[:, 0]), torch.zeros_like(lam[:, 0])
        for column in lam.unbind(dim=1):
            mass += column * stayed
            stayed *= 1 - column
        lets_go = (mass >= request.real(Column.EXIT_THRESHOLD)[:, 0]) | (depth == depths - 1)
        action = io.coda_action[:rows]
        io.coda_left[:rows].copy_((action == Action.SAMPLE) | ((action == Action.GATE) & lets_go))

    def draw_greedy(self, io: StepIO, rows: int) -> None:
        """The first of the largest logits."""
        _emit(io, rows, io.logits[:rows].argmax(dim=1).int())

    def draw(self, io: StepIO, rows: int) -> None:
        """Sort the processed logits, find how many of the sorted tokens are kept, and invert their CDF."""
        vocab = io.logits.shape[1]
        tokens = []
        for block in _blocks(io, rows):
            request = _Rows(io, block)
            logits = _banned_and_biased(_penalised(io.logits[block].float(), io, request), request)
            ids = _ids_of(_keys(logits).sort(dim=1, descending=True).values, vocab)
            pick = _pick(logits.gather(1, ids).double(), request)
            tokens.append(ids.gather(1, pick)[:, 0].int())
        _emit(io, rows, torch.cat(tokens))

    def score(self, io: StepIO, rows: int) -> None:
        """Log-softmax in float32."""
        vocab, top = io.logits.shape[1], io.top_ids.shape[1]
        for block in _blocks(io, rows):
            request = _Rows(io, block)
            logits = io.logits[block].float()
            following = io.token_table[request.slot, request.pos + 1]
            token = torch.where(io.coda_action[block] == Action.SCORE, following, io.coda_token[block])
            token = token.clamp(0, vocab - 1).long().unsqueeze(1)
            logprobs = torch.log_softmax(logits, dim=1)
            io.coda_logprob[block].copy_(logprobs.gather(1, token)[:, 0])
            io.coda_rank[block].copy_((logits > logits.gather(1, token)).sum(dim=1))
            ids = _ids_of(_keys(logits).topk(top, dim=1).values, vocab)
            io.top_ids[block].copy_(ids)
            io.top_logprobs[block].copy_(logprobs.gather(1, ids))

    def copy_exits(self, io: StepIO, pools: Pools, rows: int) -> None:
        """One gather of the exit planes, one scatter into all others: those that are not deeper are scratch."""
        request = _Rows(io, slice(0, rows))
        depth, action = io.coda_depth[:rows].long(), io.coda_action[:rows]
        copied = (io.coda_left[:rows] == 1) | (action == Action.REPLAY)
        copied &= request.whole(Column.EXIT_COPY)[:, 0] == 1
        page, offset = pages_of(io, pools, request.slot, request.pos), request.pos % pools.page_size
        plane = torch.arange(1, pools.k.shape[1], device=page.device)
        goes = copied.unsqueeze(1) & (plane > depth.unsqueeze(1))
        to_page = torch.where(goes, page.unsqueeze(1), pools.k.shape[0] - 1)
        to_offset = torch.where(goes, offset.unsqueeze(1), 0)
        for pool in (pools.k, pools.v):
            vectors = pool.transpose(2, 3)  # [page, depth, offset, layer, head, dim]
            exits = vectors[page, depth, offset].unsqueeze(1).expand(-1, plane.shape[0], -1, -1, -1)
            vectors.index_put_((to_page, plane, to_offset), exits)


def pages_of(io: StepIO, pools: Pools, slot: Tensor, pos: Tensor) -> Tensor:
    """Page of each (slot, position); int64."""
    return io.page_table[slot, pos.div(pools.page_size, rounding_mode="floor")].long()


class _Rows:
    """Slot, position ``[R]`` int64, and parameters of some coda rows."""

    def __init__(self, io: StepIO, block: slice) -> None:
        self.slot = io.coda_slot[block].long()
        self.pos = io.coda_pos[block].long()
        self._params = io.params[self.slot]

    def whole(self, column: Column, count: int = 1) -> Tensor:
        """Integers ``[R, count]`` int32 from a column on."""
        return self._params[:, column : column + count]

    def real(self, column: Column, count: int = 1) -> Tensor:
        """Numbers ``[R, count]`` float32 from a column on."""
        return self._params.view(torch.float32)[:, column : column + count]


def _blocks(io: StepIO, rows: int) -> Iterator[slice]:
    size = max(1, _BLOCK_LIMIT // io.logits.shape[1])
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _emit(io: StepIO, rows: int, token: Tensor) -> None:
    """Report and store ``token [rows]`` int32 of rows that left; what the others store goes to scratch."""
    left = io.coda_left[:rows] == 1
    io.coda_token[:rows].copy_(torch.where(left, token, -1))
    slot = torch.where(left, io.coda_slot[:rows], io.token_table.shape[0] - 1)
    pos = torch.where(left, io.coda_pos[:rows] + 1, 0)
    io.token_table.index_put_((slot.long(), pos.long()), token)


def _penalised(logits: Tensor, io: StepIO, request: _Rows) -> Tensor:
    """``logits [R, V]`` with the three penalties, in a new tensor."""
    rows, vocab = logits.shape
    place = torch.arange(io.token_table.shape[1], device=logits.device)
    known = place <= request.pos.unsqueeze(1)
    output = known & (place >= request.whole(Column.PROMPT_LEN))
    # What lies beyond the row's position may be anything: it goes to a column that nobody reads.
    token = torch.where(known, io.token_table[request.slot], vocab).clamp_(0, vocab).long()
    zeros = logits.new_zeros(rows, vocab + 1)
    occurs = zeros.scatter(1, token, 1.0)[:, :vocab] > 0
    count = zeros.scatter_add(1, token, output.float())[:, :vocab]

    repetition = request.real(Column.REPETITION)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(occurs, scaled, logits)
    out.sub_(request.real(Column.FREQUENCY) * count)
    return out.sub_(request.real(Column.PRESENCE) * (count > 0))


def _banned_and_biased(logits: Tensor, request: _Rows) -> Tensor:
    """Add bias, and -inf to stop ids that come too early, in place. Entries not in use add zero."""
    device = logits.device
    outputs = request.pos.unsqueeze(1) + 1 - request.whole(Column.PROMPT_LEN)
    early = outputs < request.whole(Column.MIN_TOKENS)
    banned = early & (torch.arange(MAX_STOP_IDS, device=device) < request.whole(Column.STOP_COUNT))
    biased = torch.arange(MAX_LOGIT_BIAS, device=device) < request.whole(Column.BIAS_COUNT)
    token = request.whole(Column.STOP_IDS, MAX_STOP_IDS + MAX_LOGIT_BIAS).clamp(0, logits.shape[1] - 1).long()
    bias = torch.where(biased, request.real(Column.BIAS_VALUES, MAX_LOGIT_BIAS), 0.0)
    return logits.scatter_add_(1, token, torch.cat((torch.where(banned, -torch.inf, 0.0), bias), dim=1))


def _keys(logits: Tensor) -> Tensor:
    """Distinct int64 keys of ``logits [R, V]`` float32, ordered as the logits are; of equals, a lower id is larger."""
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long() * 2**32 + torch.arange(vocab - 1, -1, -1, device=logits.device)


def _ids_of(keys: Tensor, vocab: int) -> Tensor:
    """The token ids that keys were made of."""
    return vocab - 1 - (keys & _WORD)


def _pick(logits: Tensor, request: _Rows) -> Tensor:
    """Which of the sorted ``logits [R, V]`` float64, largest first, each row draws -> ``[R, 1]`` int64."""
    temperature = request.real(Column.TEMPERATURE).double()
    top_k, top_p, min_p = request.whole(Column.TOP_K), request.real(Column.TOP_P), request.real(Column.MIN_P)
    scaled = (logits - logits[:, :1]) / torch.where(temperature > 0, temperature, 1.0)
    probability = torch.softmax(scaled, dim=1)
    kept = (torch.arange(logits.shape[1], device=logits.device) < top_k) | (top_k == 0)
    mass = torch.where(kept, probability, 0.0).cumsum(dim=1)
    kept &= (mass - probability < top_p.double() * mass[:, -1:]) | (top_p >= 1)
    kept &= probability >= min_p.double() * probability[:, :1]
    last = (kept.sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    drawn = (mass <= _uniform(request) * mass.gather(1, last)).sum(dim=1, keepdim=True)
    return torch.where(temperature > 0, torch.minimum(drawn, last), 0)


def _uniform(request: _Rows) -> Tensor:
    """One number in [0, 1) for each row ``[R, 1]`` float64, a multiple of 2**-24."""
    key = request.whole(Column.SEED_LOW, 2).long() & _WORD
    return ((philox(key, request.pos + 1) >> 8).double() * 2.0**-24).unsqueeze(1)


def philox(key: Tensor, counter: Tensor) -> Tensor:
    """First word of Philox4x32-10 for ``key [R, 2]`` and counter ``(counter [R], 0, 0, 0)``; 32-bit words in int64.

    A product of two words may overflow into the sign; its bits are right all the same.
    """
    k0, k1 = key.unbind(dim=1)
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero, zero, zero
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = ((product0 >> 32) & _WORD) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0
