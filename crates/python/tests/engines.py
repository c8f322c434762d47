"""What the tests of plugins share: a sampler that enqueues on the CPU, and operations that wait on a GPU."""

import logging

import numpy
import torch

from flash_sampling import FlashSamplingError, History, Sampler, SamplingParams

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
FLOATS = ("temperature", "top_p", "min_p", *PENALTIES)
LISTS = ("bias", "banned", "stop", "prompt", "output")
RESULTS = {"logprobs": torch.float32, "ranks": torch.int32, "top_tokens": torch.int32, "top_logprobs": torch.float32}


class Enqueued:
    """A sampler on the CPU with the checks of `Sampler.enqueue`."""

    def __init__(self, head, max_rows, max_adjusted=None):
        self.sampler = Sampler(head, max_rows, max_logprobs=128)
        self.max_adjusted = max_adjusted
        self.calls = []

    def enqueue(
        self, hidden, out, *, seed, position, index=None, statuses=None, logprobs_mode="processed_logprobs",
        complete=False, **columns,
    ):
        self.calls.append(sorted(columns))
        if index is not None:
            assert index.dtype == torch.int32 and index.shape == (len(hidden),)
            is_column = {"seed": True, **{name: name not in RESULTS and name != "mask" for name in columns}}
            is_column |= {f"{name}_{of}": False for name in LISTS for of in ("tokens", "values")}
            columns |= {"seed": seed}
            columns |= {name: columns[name][index.long()] for name in columns if is_column[name]}
            seed = columns.pop("seed")
        assert position.dtype in (torch.int32, torch.int64)
        position = position.long()
        self.seeds = seed
        kinds = dict.fromkeys(FLOATS, torch.float32)
        kinds |= {"seed": torch.int64, "position": torch.int64, "top_k": torch.int32}
        lists = {name: columns.pop(name) for name in list(columns) if name.split("_")[0] in LISTS}
        lists |= {"min_tokens": columns.pop("min_tokens")} if "min_tokens" in columns else {}
        results = {name: columns.pop(name) for name in RESULTS if name in columns}
        mask = columns.pop("mask", None)
        columns |= {"seed": seed, "position": position}
        for name, column in columns.items():
            assert column.dtype == kinds[name] and column.shape == (len(hidden),) and column.is_contiguous(), name
        for name, result in results.items():
            assert result.dtype == RESULTS[name] and result.shape[:1] == (len(hidden),) and result.is_contiguous(), name
        columns["seed"] = seed.numpy().view(numpy.uint64)
        errors = {}
        has_samples = lists or results
        try:
            if has_samples:
                drawn = self.sample(hidden, lists, mask, results, logprobs_mode, **columns)
            else:
                drawn = self.sampler(hidden, mask=mask, **columns)
        except FlashSamplingError as error:
            drawn, errors = error.results, error.errors
        if has_samples:
            write_results(results, drawn, complete)
            drawn = [-1 if row is None else row.token for row in drawn]
        failed = torch.tensor([2 if row in errors else 0 for row in range(len(hidden))])
        if "top_k" in columns:
            top_k = columns["top_k"]
            failed[(top_k > 1024) & (top_k < self.sampler.vocab_size) & (columns["temperature"] > 0)] = 7
        out.copy_(torch.where(failed > 0, 0 if complete else -1, torch.as_tensor(drawn)))
        if statuses is not None:
            assert statuses.dtype == torch.int32
            statuses.copy_(failed)

    def sample(self, hidden, lists, mask, results, logprobs_mode, *, seed, position, **columns):
        """All results of a call."""
        for name, tensor in lists.items():
            kind = torch.float32 if name == "bias_values" else torch.int32 if name.endswith("_tokens") else torch.int64
            assert tensor.dtype == kind and tensor.ndim == 1 and tensor.is_contiguous(), name
        lists, columns = ({name: tensor.numpy() for name, tensor in of.items()} for of in (lists, columns))
        params, histories = [], []
        for row in range(len(hidden)):

            def part(kind, of="tokens"):
                if f"{kind}_{of}" not in lists:
                    return []
                begin, end = (int(lists[f"{kind}_{edge}"][row]) for edge in ("begin", "end"))
                assert 0 <= begin and end <= len(lists[f"{kind}_{of}"]), kind
                return lists[f"{kind}_{of}"][begin:end].tolist()

            given = {name: column[row].item() for name, column in columns.items()}
            given["logit_bias"] = dict(zip(part("bias"), part("bias", "values")))
            given["banned_token_ids"] = [token for token in part("banned") if token >= 0]
            if "min_tokens" in lists:
                is_short = len(part("output")) < lists["min_tokens"][row]
                given["banned_token_ids"] += part("stop") if is_short else []
            has_repetition = given.get("repetition_penalty", 1) != 1
            has_penalty = has_repetition or any(given.get(name, 0) != 0 for name in PENALTIES[1:])
            # Tokens of the sequence that have no effect may be anything.
            history = (part("prompt") if has_repetition else [], part("output") if has_penalty else [])
            adjusted = {*given["logit_bias"], *given["banned_token_ids"], *history[0], *history[1]}
            assert not lists or len(adjusted) <= self.max_adjusted
            if results:
                top_n = results["top_tokens"].shape[1] if "top_tokens" in results else 0
                given |= {"logprobs": top_n, "logprobs_mode": logprobs_mode, "ranks": True}
            params.append(SamplingParams(**given))
            histories.append(History(*history))
        return self.sampler.sample(hidden, params, histories, seed=seed, position=position, mask=mask)


def write_results(results, rows, complete=False):
    """Writes the results of rows to the tensors of a call; a failed row is None."""
    for name, result in results.items():
        result.fill_(0 if name == "ranks" else -1 if name == "top_tokens" else -numpy.inf)
        for r, row in enumerate(rows):
            if row is None:
                continue
            if name.startswith("top_"):
                values = [pair[name == "top_logprobs"] for pair in row.top]
                result[r, : len(values)] = torch.tensor(values, dtype=result.dtype)
            else:
                result[r] = row.logprob if name == "logprobs" else row.rank
        if complete and name == "top_tokens":
            for row in result.numpy():
                for place in numpy.flatnonzero(row < 0):
                    row[place] = next(token for token in range(len(row)) if token not in row)


class Event:
    """An event of a stream that has not run the last step."""

    last = None

    def record(self):
        Event.last = self

    def query(self):
        return self is not Event.last


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses operations that read values of tensors, which wait on a GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return operation(*args, **(kwargs or {}))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
