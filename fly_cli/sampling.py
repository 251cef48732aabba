"""How a row of logits becomes a token: greedily, or with noise that target and drafter share.

Sampling takes argmax(log p + g) with Gumbel noise g (the Gumbel-max trick), p being the softmax after
temperature, top-k and top-p, in fp32. The noise depends on (seed, absolute position, id) alone, so drafter and
target draw alike where their distributions are alike, and in `exact` mode the text is the same text whatever
the drafter, the draft length or the schedule.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from .settings import DecodeSettings

NUCLEUS_CANDIDATES = 1024  # top-p sorts these first; a full sort of 150,000 ids takes 20 times as long
COLDEST, HOTTEST = 1e-6, 1e6  # beyond them nothing changes but fp32 overflows
NOISE_ROWS_KEPT = 64  # positions of one round, read by the drafter and again by the target


class Chooser:
    """Picks the token of each row by one rule, for target and drafter alike."""

    def __init__(self, settings: DecodeSettings, vocab_size: int, seed: int = 0):
        self.greedy = settings.temperature == 0
        self.temperature = min(max(settings.temperature, COLDEST), HOTTEST)
        self.top_k = settings.top_k
        self.top_p = settings.top_p
        self.noise = Noise(seed, vocab_size)

    def warp(self, logits: Tensor) -> Tensor:
        """Log-weights after temperature, top-k and top-p, -inf where excluded. [rows, V] -> [rows, V] fp32.

        Greedy decoding has no use for any of the three: the logits come back as they are.
        """
        if self.greedy:
            return logits
        # Subtracting the peak first keeps a tiny temperature finite.
        logits = logits.float()
        logits = (logits - logits.max(dim=-1, keepdim=True).values) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        return logits

    def choose(self, warped: Tensor, position: int) -> Tensor:
        """The token of each row. [rows, V] -> [rows] ids; row i predicts absolute position `position + i`."""
        if self.greedy:
            return warped.argmax(dim=-1)
        noise = self.noise.rows(position, warped.shape[0], warped.device)[:, : warped.shape[-1]]
        # argmax(log p + g) with g = -ln(E), E exponential, is argmax(p / E).
        return (warped.softmax(dim=-1) / noise).argmax(dim=-1)


class Noise:
    """Standard exponential noise rows, each a function of (seed, position) and nothing else."""

    def __init__(self, seed: int, vocab_size: int):
        self.seed = seed
        self.vocab_size = vocab_size
        self._kept: dict[int, Tensor] = {}

    def rows(self, position: int, count: int, device: torch.device) -> Tensor:
        """[count, V] fp32, made on the CPU so that the text does not depend on the device."""
        return torch.stack([self._row(position + i) for i in range(count)]).to(device)

    def _row(self, position: int) -> Tensor:
        if position not in self._kept:
            while len(self._kept) >= NOISE_ROWS_KEPT:
                del self._kept[next(iter(self._kept))]
            generator = numpy.random.Generator(numpy.random.Philox(key=[self.seed, position]))
            row = torch.from_numpy(generator.standard_exponential(self.vocab_size, dtype=numpy.float32))
            self._kept[position] = row.clamp_(min=1e-30)  # a zero would make 0 / 0 of an excluded id
        return self._kept[position]


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits with all but the k largest of each row at -inf (ties with the k-th stay). [rows, V] -> [rows, V]."""
    smallest = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits of the smallest set of likeliest ids whose probabilities reach p, the rest at -inf. [rows, V] -> same.

    Ties with the least likely of the set stay, so that the set depends on the row alone and on no order of sorting.
    """
    probabilities = logits.softmax(dim=-1)
    largest = probabilities.topk(min(NUCLEUS_CANDIDATES, logits.shape[-1]), dim=-1).values
    # An accelerator sorts all ids faster than it can be asked whether the candidates will do.
    if logits.device.type != "cpu" or bool((largest.sum(dim=-1) < p).any()):
        largest = probabilities.sort(dim=-1, descending=True).values
    inside = largest.cumsum(dim=-1) - largest < p  # the mass of the likelier ids
    inside[:, 0] = True
    least = largest.masked_fill(~inside, torch.inf).min(dim=-1, keepdim=True).values
    return logits.masked_fill(probabilities < least, -torch.inf)
