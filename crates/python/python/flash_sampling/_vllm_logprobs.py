"""The log-probabilities of drawn tokens, in vLLM's type of results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The values of vLLM's `logprobs_mode` that return log-probabilities. The other values return logits.
MODES = ("raw_logprobs", "processed_logprobs")
# The maximum number of `top_tokens` per row of `Sampler.enqueue`.
TOP_N_MAX = 128


def empty_results(rows: int, top_n: int, device: torch.device) -> dict[str, Tensor]:
    """Returns tensors for the results of `Sampler.enqueue`: log-probabilities, ranks and the most probable tokens."""
    shapes = {"logprobs": ([rows], torch.float32), "ranks": ([rows], torch.int32)}
    if top_n > 0:
        shapes |= {"top_tokens": ([rows, top_n], torch.int32), "top_logprobs": ([rows, top_n], torch.float32)}
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


def logprobs_tensors(tokens: Tensor, results: dict[str, Tensor], vocab_size: int) -> Any:
    """Returns the `LogprobsTensors` of drawn tokens [rows] and the results of their draws."""
    from vllm.v1.outputs import LogprobsTensors

    ids, logprobs = tokens[:, None], results["logprobs"][:, None]
    if "top_tokens" in results:
        ids = torch.cat((ids, complete(results["top_tokens"].long(), vocab_size)), 1)
        logprobs = torch.cat((logprobs, results["top_logprobs"]), 1)
    return LogprobsTensors(ids, logprobs, results["ranks"].long())


def complete(top: Tensor, vocab_size: int) -> Tensor:
    """Replaces each -1 of a row by a token that the row does not have: [rows, n] int64, n at most `vocab_size`.

    `Sampler.enqueue` writes -1 after the last token with a probability above 0. vLLM has no such value: in
    vLLM, a row has n different tokens, and tokens with probability 0 have the log-probability -inf.
    """
    n = top.shape[1]
    is_top = (top[:, :, None] == torch.arange(min(2 * n, vocab_size), device=top.device)).any(1)
    others = is_top.int().argsort(dim=1, stable=True)
    place = torch.arange(n, device=top.device) - (top >= 0).sum(1, keepdim=True)
    return torch.where(top >= 0, top, others.gather(1, place.clamp(min=0)))


def replace_rows(of_batch: Any, index: Tensor, rows: Any) -> None:
    """Writes the `LogprobsTensors` of some rows to those of the batch. index: the indices of the rows in the batch."""
    columns = rows.logprobs.shape[1]
    of_batch.logprob_token_ids[index, :columns] = rows.logprob_token_ids
    of_batch.logprobs[index, :columns] = rows.logprobs
    of_batch.selected_token_ranks[index] = rows.selected_token_ranks
