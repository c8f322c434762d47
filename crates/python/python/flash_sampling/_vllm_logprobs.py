"""The log-probabilities of drawn tokens, in vLLM's type of results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The values of vLLM's `logprobs_mode` that return log-probabilities. The other values return logits.
MODES = ("raw_logprobs", "processed_logprobs")
# The maximum number of `top_tokens` per row of `Sampler.enqueue`.
TOP_N_MAX = 128
# vLLM's `num_logprobs` of a request without log-probabilities.
NO_LOGPROBS = -1


def empty_results(rows: int, top_n: int, device: torch.device) -> dict[str, Tensor]:
    """Returns tensors for the results of `Sampler.enqueue`: log-probabilities, ranks and the most probable tokens."""
    shapes = {"logprobs": ([rows], torch.float32), "ranks": ([rows], torch.int32)}
    if top_n > 0:
        shapes |= {"top_tokens": ([rows, top_n], torch.int32), "top_logprobs": ([rows, top_n], torch.float32)}
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


def logprobs_tensors(tokens: Tensor, results: dict[str, Tensor]) -> Any:
    """Returns the `LogprobsTensors` of drawn tokens [rows] and the results of their draws, in new memory.

    In vLLM, a row has n different tokens, so `Sampler.enqueue` must complete `top_tokens`.
    """
    from vllm.v1.outputs import LogprobsTensors

    ids, logprobs = tokens[:, None], results["logprobs"][:, None]
    top = (results["top_tokens"], results["top_logprobs"]) if "top_tokens" in results else (ids[:, :0], logprobs[:, :0])
    return LogprobsTensors(torch.cat((ids, top[0]), 1), torch.cat((logprobs, top[1]), 1), results["ranks"].long())


def replace_rows(of_batch: Any, index: Tensor, rows: Any) -> None:
    """Writes the `LogprobsTensors` of some rows to those of the batch. index: the indices of the rows in the batch."""
    columns = rows.logprobs.shape[1]
    of_batch.logprob_token_ids[index, :columns] = rows.logprob_token_ids
    of_batch.logprobs[index, :columns] = rows.logprobs
    of_batch.selected_token_ranks[index] = rows.selected_token_ranks
