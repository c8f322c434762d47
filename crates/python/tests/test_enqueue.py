"""`enqueue`, which does not wait, draws the tokens of calls that wait, also in a captured graph."""

import json

import grammars
import numpy
import pytest
from conftest import Problem, library, no_waits
from test_package import run, scripts

from flash_sampling import FlashSamplingError, Head, History, Sampler, SamplingParams, from_logits

torch = library("torch")
pytestmark = pytest.mark.usefixtures("gpu")


def device_keys(keys):
    return {name: torch.tensor(values, dtype=torch.int64, device="cuda") for name, values in keys.items()}


def test_a_call_that_does_not_wait_draws_the_same_tokens(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    hidden = torch.tensor(problem.hidden, device="cuda")
    params = {
        "seed": torch.tensor(problem.seeds, dtype=torch.int64),
        "position": torch.tensor(problem.positions, dtype=torch.int64),
        "temperature": torch.tensor([0.5, 1.0, 2.0, 0.0]),
        "top_k": torch.tensor([0, 10, -1, 3], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 0.7, 0.5]),
        "mask": torch.full((4, 32), -2, dtype=torch.int32),
    }
    on_gpu = {name: value.cuda() for name, value in params.items()}
    want = sampler(hidden, **on_gpu)
    out, statuses = (torch.full((4,), 99, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    assert sampler.enqueue(hidden, out, statuses=statuses, **on_gpu) is out
    torch.cuda.synchronize()
    with no_waits():
        sampler.enqueue(hidden, out, statuses=statuses, **on_gpu)
    assert torch.equal(out, want) and statuses.tolist() == [0, 0, 0, 0]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.enqueue(hidden, out, statuses=statuses, **on_gpu)
    on_gpu["position"] += 7
    on_gpu["temperature"][1] = float("nan")
    graph.replay()
    on_gpu["temperature"][1] = 1
    want = sampler(hidden, **on_gpu)
    assert out.tolist() == [want[0], -1, want[2], want[3]] and statuses.tolist()[1] & 255 == 7


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_log_probabilities_of_a_call_that_does_not_wait(problem, mode):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_logprobs=3)
    hidden = torch.tensor(problem.hidden, device="cuda")
    keys = device_keys(problem.keys)
    filters = [{}, {"top_k": 10}, {"top_p": 0.7}, {"temperature": 0.0}]
    params = [SamplingParams(logprobs=3, logprobs_mode=mode, ranks=True, kept=0 < r < 3, **row) for r, row in enumerate(filters)]
    want = sampler.sample(hidden, params, **problem.keys)
    empty = lambda *shape, dtype: torch.full(shape, 77, dtype=dtype, device="cuda")
    results = {
        "logprobs": empty(4, dtype=torch.float32),
        "ranks": empty(4, dtype=torch.int32),
        "log_z": empty(4, dtype=torch.float64),
        "top_tokens": empty(4, 3, dtype=torch.int32),
        "top_logprobs": empty(4, 3, dtype=torch.float32),
        "kept_begin": empty(5, dtype=torch.int64),
        "kept_tokens": empty(4000, dtype=torch.int32),
    }
    columns = {
        "top_k": torch.tensor([row.get("top_k", 0) for row in filters], dtype=torch.int32, device="cuda"),
        "top_p": torch.tensor([row.get("top_p", 1.0) for row in filters], device="cuda"),
        "temperature": torch.tensor([row.get("temperature", 1.0) for row in filters], device="cuda"),
    }
    out = empty(4, dtype=torch.int64)
    sampler.enqueue(hidden, out, **keys, **columns, **results, logprobs_mode=mode)
    found = {name: tensor.cpu() for name, tensor in results.items()}
    begin = found["kept_begin"].tolist()
    for r, row in enumerate(want):
        assert (out[r], found["ranks"][r]) == (row.token, row.rank)
        assert found["logprobs"][r] == pytest.approx(row.logprob, rel=1e-6, abs=1e-12)
        assert found["log_z"][r] == pytest.approx(row.log_z, rel=1e-14, abs=1e-14)
        # A row may keep fewer tokens.
        top = row.top + [(-1, -numpy.inf)] * (3 - len(row.top))
        assert found["top_tokens"][r].tolist() == [token for token, _ in top]
        assert found["top_logprobs"][r].tolist() == pytest.approx([nats for _, nats in top], rel=1e-6, abs=1e-12)
        kept = found["kept_tokens"][begin[r] : begin[r + 1]].tolist()
        assert kept == (row.kept.token_ids if row.kept else [])


def test_a_call_without_rows_keeps_no_tokens(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    hidden = torch.tensor(problem.hidden, device="cuda")[:0]
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    begin = torch.full((1,), 77, dtype=torch.int64, device="cuda")
    sampler.enqueue(hidden, none, seed=none, position=none, kept_begin=begin)
    assert begin.tolist() == [0]


def test_tensors_of_a_call_that_does_not_wait_are_checked(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    hidden = torch.tensor(problem.hidden, device="cuda")
    keys = device_keys(problem.keys)
    out = torch.empty(4, dtype=torch.int64, device="cuda")
    for name, value, fault in [
        ("temperature", torch.ones(4, dtype=torch.float64, device="cuda"), "4 contiguous elements of float32"),
        ("top_k", torch.ones(3, dtype=torch.int32, device="cuda"), "4 contiguous elements of int32"),
        ("top_p", torch.ones(4), "top_p is on the CPU, but must be on cuda:0"),
        ("mask", torch.ones((4, 32), dtype=torch.int64, device="cuda"), r"must be \[4, 32\] of int32"),
    ]:
        with pytest.raises(FlashSamplingError, match=fault) as error:
            sampler.enqueue(hidden, out, **{**keys, name: value})
        assert error.value.knob == name


def test_logits_of_a_call_that_does_not_wait(problem):
    sampler = Sampler.for_logits(1000, backend="cuda:0")
    logits = torch.tensor(problem.logits, dtype=torch.bfloat16, device="cuda")
    params = {
        "seed": torch.tensor(problem.seeds, dtype=torch.int64),
        "position": torch.tensor(problem.positions, dtype=torch.int64),
        "temperature": torch.tensor([0.5, 1.0, 2.0, 0.0]),
        "top_k": torch.tensor([0, 10, -1, 3], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 0.7, 0.5]),
        "mask": torch.full((4, 32), -2, dtype=torch.int32),
    }
    on_gpu = {name: value.cuda() for name, value in params.items()}
    out, statuses = (torch.full((4,), 99, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    sampler.enqueue(logits, out, statuses=statuses, **on_gpu)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), from_logits(logits.cpu(), **params)) and statuses.tolist() == [0, 0, 0, 0]
    with no_waits():
        sampler.enqueue(logits, out, statuses=statuses, **on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.enqueue(logits, out, statuses=statuses, **on_gpu)
    for step in range(3):
        logits += torch.randint_like(logits, 9)
        on_gpu["position"] += 7
        graph.replay()
        assert torch.equal(out, sampler(logits, **on_gpu)), step
    logits[1, 30], logits[2, 5] = float("nan"), float("inf")
    logits[3] = float("-inf")
    graph.replay()
    assert out.tolist() == [sampler(logits[:1], **{name: value[:1] for name, value in on_gpu.items()}).item(), -1, -1, -1]
    assert [status & 255 for status in statuses.tolist()] == [0, 2, 3, 1]


def test_the_script_of_enqueue_runs():
    lines = run(scripts()[2]).splitlines()
    assert len(set(lines)) == 3 and all(0 <= token < 32000 for line in lines for token in json.loads(line))


def csr(lists, dtype=torch.int32):
    """Lists in CSR form: the offsets, and the elements of all lists."""
    begin = torch.tensor([0, *map(len, lists)], dtype=torch.int64, device="cuda").cumsum(0)
    return begin, torch.tensor([element for each in lists for element in each], dtype=dtype, device="cuda")


class Adjusted:
    """Requests with every adjustment of logits, as tensors on the GPU and as `SamplingParams` and histories."""

    def __init__(self, logits):
        numbers, best = numpy.random.default_rng(11), numpy.argsort(-logits, axis=1)
        # Lists of likely tokens, so that each list changes draws.
        lists = lambda counts: [numbers.permutation(row[: 2 * count])[:count].tolist() for row, count in zip(best, counts)]
        # Outputs repeat tokens, and some biased tokens are banned or penalised.
        self.prompt, self.output = lists([40, 0, 7, 300]), [2 * each for each in lists([30, 5, 0, 11])]
        self.bias, self.banned, self.stop = lists([10, 0, 500, 3]), lists([0, 600, 2, 50]), lists([3, 300, 0, 900])
        self.values = [[float(value) for value in numbers.integers(-6, 7, len(each))] for each in self.bias]
        self.columns = {
            "repetition_penalty": [1.5, 1.0, 1.25, 2.0],
            "frequency_penalty": [0.5, 0.0, 0.5, 1.0],
            "presence_penalty": [0.0, 2.0, 0.25, -1.0],
            "min_tokens": [100, 0, 1, 23],
            "temperature": [0.5, 1.0, 0.0, 2.0],
            "top_p": [1.0, 0.9, 1.0, 0.5],
        }

    def tensors(self):
        dtype = lambda name: torch.int32 if name == "min_tokens" else torch.float32
        given = {name: torch.tensor(values, dtype=dtype(name), device="cuda") for name, values in self.columns.items()}
        for name in ("prompt", "output", "bias", "banned", "stop"):
            given[f"{name}_begin"], given[f"{name}_tokens"] = csr(getattr(self, name))
        return given | {"bias_values": csr(self.values, torch.float32)[1]}

    def sample(self, sampler, hidden, keys):
        """The tokens of the same requests by `sample`."""
        columns = [dict(zip(self.columns, values)) for values in zip(*self.columns.values())]
        rows = zip(self.bias, self.values, self.banned, self.stop, columns, strict=True)
        params = [
            SamplingParams(logit_bias=dict(zip(bias, values)), banned_token_ids=banned, stop_token_ids=stop, **column)
            for bias, values, banned, stop, column in rows
        ]
        histories = [History(*each) for each in zip(self.prompt, self.output)]
        return [row.token for row in sampler.sample(hidden, params, histories, **keys)]


def draws_of(kind, problem):
    """A sampler and its input on the GPU."""
    if kind == "logits":
        return Sampler.for_logits(1000, backend="cuda:0", max_adjusted=1000), torch.tensor(problem.logits, device="cuda")
    head = Head(torch.tensor(problem.weight, device="cuda"))
    return Sampler(head, max_adjusted=1000), torch.tensor(problem.hidden, device="cuda")


@pytest.mark.parametrize("kind", ["head", "logits"])
def test_lists_of_tokens_of_a_call_that_does_not_wait(problem, kind):
    sampler, given = draws_of(kind, problem)
    requests, keys = Adjusted(problem.logits), {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    tensors, out = requests.tensors(), torch.full((4,), 99, dtype=torch.int64, device="cuda")
    statuses = torch.full((4,), 99, dtype=torch.int32, device="cuda")
    call = lambda **tensors: sampler.enqueue(given, out, statuses=statuses, **keys, **tensors)
    call(**tensors)
    want = requests.sample(sampler, given, problem.keys)
    assert out.tolist() == want and statuses.tolist() == [0] * 4
    # The negative control: each parameter changes tokens at some positions.
    differ = set()
    for position in range(0, 200, 10):
        keys["position"][:] = position
        call(**tensors)
        all_tokens = out.tolist()
        for name in ("prompt", "output", "bias", "banned", "stop"):
            call(**{other: tensor for other, tensor in tensors.items() if not other.startswith(f"{name}_")})
            differ |= {name} if out.tolist() != all_tokens else set()
    assert differ == {"prompt", "output", "bias", "banned", "stop"}

    # Lists at any place of a larger tensor.
    keys["position"].copy_(torch.tensor(problem.positions))
    for name in ("prompt", "output"):
        lists = getattr(requests, name)
        slots = torch.full((9, 400), 5, dtype=torch.int32, device="cuda")
        begin = torch.tensor([400 * slot + slot for slot in (7, 2, 8, 0)], device="cuda")
        for row, slot in enumerate((7, 2, 8, 0)):
            slots[slot, slot : slot + len(lists[row])] = torch.tensor(lists[row], dtype=torch.int32)
        tensors[f"{name}_begin"], tensors[f"{name}_tokens"] = begin, slots.view(-1)
        tensors[f"{name}_end"] = begin + torch.tensor([len(each) for each in lists], device="cuda")
    call(**tensors)
    assert out.tolist() == want

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**tensors)
    for step in range(3):
        # Later values: the tokens of the last step are generated, and the penalties grow.
        for row, token in enumerate(want):
            requests.output[row].append(token)
            tensors["output_tokens"][tensors["output_end"][row]] = token
        tensors["output_end"] += 1
        tensors["frequency_penalty"] += 0.5
        requests.columns["frequency_penalty"] = tensors["frequency_penalty"].tolist()
        graph.replay()
        want = requests.sample(sampler, given, problem.keys)
        assert out.tolist() == want, step
    tensors["repetition_penalty"][2] = 0
    graph.replay()
    assert out.tolist() == [*want[:2], -1, want[3]] and statuses.tolist()[2] & 255 == 7


def test_rows_with_more_adjusted_tokens_than_planned_fail_alone(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_adjusted=20)
    hidden = torch.tensor(problem.hidden, device="cuda")
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    begin, tokens = csr([range(20), range(21), [5] * 30, []])
    out, statuses = (torch.full((4,), 99, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    sampler.enqueue(hidden, out, statuses=statuses, banned_begin=begin, banned_tokens=tokens, **keys)
    params = [SamplingParams(banned_token_ids=banned) for banned in ([*range(20)], [], [5], [])]
    want = [row.token for row in sampler.sample(hidden, params, **problem.keys)]
    assert out.tolist() == [want[0], -1, *want[2:]] and [status & 255 for status in statuses.tolist()] == [0, 7, 0, 0]
    unplanned = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    with pytest.raises(FlashSamplingError, match=r"banned_tokens needs Sampler\(max_adjusted=...\)") as error:
        unplanned.enqueue(hidden, out, banned_begin=begin, banned_tokens=tokens, **keys)
    assert error.value.knob == "max_adjusted"


@pytest.mark.parametrize("kind", ["head", "logits"])
def test_an_index_gives_each_row_the_parameters_of_a_slot(problem, kind):
    """A call with an index draws the tokens of gathered parameters, also after changes of parameters and index."""
    sampler, given = draws_of(kind, problem)
    requests = Adjusted(problem.logits)
    gathered, slots = requests.tensors(), [7, 2, 8, 0]
    at = torch.tensor(slots, device="cuda")
    index, position = at.int(), torch.tensor(problem.positions, device="cuda")
    seed = torch.tensor(problem.seeds, device="cuda")
    mask = torch.full((4, 32), -1, dtype=torch.int32, device="cuda")
    mask[:, 3] = 0

    def pooled(column, fill):
        """A tensor with the elements of rows at their slots, and with invalid elements at the others."""
        return torch.full((9,), fill, dtype=column.dtype, device="cuda").index_copy_(0, at, column)

    # Each slot has its tokens at any place of a larger tensor. The slots of other requests have lists outside of it.
    columns = {name: pooled(gathered[name], float("nan")) for name in requests.columns if name != "min_tokens"}
    columns |= {"min_tokens": pooled(gathered["min_tokens"], 10**9), "seed": pooled(seed, -1)}
    for name in ("prompt", "output", "bias", "banned", "stop"):
        begin = gathered[f"{name}_begin"]
        columns[f"{name}_begin"], columns[f"{name}_end"] = (pooled(edge, 2**40) for edge in (begin[:-1], begin[1:]))
        columns[f"{name}_tokens"] = gathered[f"{name}_tokens"]
    columns["bias_values"] = gathered["bias_values"]
    out, statuses = (torch.full((4,), 99, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.int32))
    call = lambda: sampler.enqueue(given, out, index=index, position=position, mask=mask, statuses=statuses, **columns)
    gathered |= {"seed": seed, "mask": mask}
    call()
    want = torch.empty_like(out)
    sampler.enqueue(given, want, position=position, **gathered)
    assert torch.equal(out, want) and statuses.tolist() == [0] * 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    differ = 0
    for step in range(30):
        position += 1
        columns["seed"] += 1
        seed += 1
        graph.replay()
        sampler.enqueue(given, want, position=position, **gathered)
        assert torch.equal(out, want) and statuses.tolist() == [0] * 4, step
        without = torch.empty_like(out)
        sampler.enqueue(given, without, seed=seed, position=position, mask=mask)
        differ += int((without != out).sum())
    assert differ > 20
    # All rows have the parameters of the slot 2.
    index.fill_(2)
    graph.replay()
    same = {name: tensor[[1] * 4] for name, tensor in gathered.items() if name in requests.columns or name == "seed"}
    for name in ("prompt", "output", "bias", "banned", "stop"):
        edges = gathered[f"{name}_begin"][1:3].repeat(4, 1)
        same |= {f"{name}_begin": edges[:, 0].contiguous(), f"{name}_end": edges[:, 1].contiguous()}
        same[f"{name}_tokens"] = gathered[f"{name}_tokens"]
    sampler.enqueue(given, want, position=position, mask=mask, bias_values=gathered["bias_values"], **same)
    assert torch.equal(out, want)
    # The negative control: a slot of no request has invalid parameters.
    index[3] = 1
    for name in ("prompt", "output", "bias", "banned", "stop"):
        columns[f"{name}_begin"][1] = columns[f"{name}_end"][1] = 0
    graph.replay()
    assert torch.equal(out[:3], want[:3]) and out[3] == -1 and statuses.tolist()[3] & 255 == 7


def test_lists_in_csr_form_have_an_index(problem):
    sampler, given = draws_of("head", problem)
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    index = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device="cuda")
    keys["seed"] = keys["seed"][:3].contiguous()
    begin, tokens = csr([range(0, 1000, 2), range(1, 1000, 2), range(0, 1000, 3)])
    out = torch.empty(4, dtype=torch.int64, device="cuda")
    sampler.enqueue(given, out, index=index, banned_begin=begin, banned_tokens=tokens, **keys)
    banned = [range(0, 1000, 3), range(0, 1000, 2), range(0, 1000, 3), range(1, 1000, 2)]
    params = [SamplingParams(banned_token_ids=[*each]) for each in banned]
    seeds = [problem.seeds[slot] for slot in index.tolist()]
    want = sampler.sample(given, params, seed=seeds, position=problem.positions)
    assert out.tolist() == [row.token for row in want]


def test_arguments_with_an_index_are_checked(problem):
    sampler, given = draws_of("head", problem)
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    out, index = (torch.zeros(4, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.int32))
    for name, value, fault in [
        ("index", index.long(), "4 contiguous elements of int32"),
        ("index", index[:3], "4 contiguous elements of int32"),
        ("position", keys["position"][:3], "4 contiguous elements"),
        ("top_k", torch.zeros(7, dtype=torch.int64, device="cuda"), "7 contiguous elements of int32"),
        ("top_p", torch.ones(14, device="cuda")[::2], "7 contiguous elements of float32"),
    ]:
        with pytest.raises(FlashSamplingError, match=fault) as error:
            sampler.enqueue(given, out, **keys | {"index": index, name: value})
        assert error.value.knob == name


def test_positions_may_be_int32(problem):
    sampler, given = draws_of("head", problem)
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    keys["position"] += 2**31 - 10
    want, out = (torch.empty(4, dtype=torch.int64, device="cuda") for _ in range(2))
    statuses = torch.empty(4, dtype=torch.int32, device="cuda")
    sampler.enqueue(given, want, **keys)
    # The elements need not be aligned to 8 bytes.
    short = torch.zeros(5, dtype=torch.int32, device="cuda")[1:].copy_(keys["position"])
    sampler.enqueue(given, out, seed=keys["seed"], position=short, statuses=statuses)
    assert torch.equal(out, want) and statuses.tolist() == [0] * 4
    short[1] = -1
    sampler.enqueue(given, out, seed=keys["seed"], position=short, statuses=statuses)
    assert out.tolist() == [want[0], -1, *want[2:]] and statuses.tolist()[1] & 255 == 7


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_complete_results_have_tokens_alone(problem, mode):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    hidden = torch.tensor(problem.hidden, device="cuda")
    hidden[1] = float("nan")
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    top_k = torch.tensor([3, 0, 1, 0], dtype=torch.int32, device="cuda")
    found = []
    for complete in (False, True):
        out = torch.full((4,), 99, dtype=torch.int64, device="cuda")
        results = {
            "logprobs": torch.full((4,), 77.0, device="cuda"),
            "top_tokens": torch.full((4, 8), 77, dtype=torch.int32, device="cuda"),
            "top_logprobs": torch.full((4, 8), 77.0, device="cuda"),
        }
        sampler.enqueue(hidden, out, top_k=top_k, complete=complete, logprobs_mode=mode, **keys, **results)
        found.append([out.tolist(), *(result.tolist() for result in results.values())])
    (out, logprobs, top, top_logprobs), completed = found
    assert out[1] == -1 and top[1] == [-1] * 8
    assert [row.count(-1) for row in top] == ([5, 8, 7, 0] if mode == "processed_logprobs" else [0, 8, 0, 0])
    for row in top:
        others = (token for token in range(1000) if token not in row)
        row[:] = [next(others) if token < 0 else token for token in row]
    out[1] = 0
    assert completed == [out, logprobs, top, top_logprobs]


@pytest.mark.parametrize("engine", grammars.ENGINES)
def test_the_bitmask_of_a_grammar_engine_is_a_mask(engine):
    words, allowed = grammars.bitmask(engine)
    rows, vocab = allowed.shape
    problem, mask = Problem(rows, vocab), torch.as_tensor(words).cuda()
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    hidden = torch.tensor(problem.hidden, device="cuda")
    problem.logits = numpy.where(allowed, problem.logits, numpy.float32(-numpy.inf))
    keys, out, differ = device_keys(problem.keys), torch.zeros(rows, dtype=torch.int64, device="cuda"), 0
    for position in range(40):
        problem.positions = [position] * rows
        keys["position"].fill_(position)
        want = problem.argmax_with_noise().tolist()
        sampler.enqueue(hidden, out, mask=mask, **keys)
        assert out.tolist() == want
        # The negative control: each row has the mask of another text.
        sampler.enqueue(hidden, out, mask=mask.roll(1, 0), **keys)
        differ += sum(token != other for token, other in zip(out.tolist(), want))
    assert differ > 20 * rows
