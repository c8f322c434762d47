"""The checks of single steps for vllm_engine.py and vllm_schedules.py: kinds of requests, and a table of figures.

In each step, the plugin draws the batch. Then vLLM's own sampler draws from the same hidden states, and both samplers
draw every row alone. The table of checks has a line for each kind of request:

    equal       the number of tokens that equal the tokens of vLLM's sampler. The noise differs, so few random tokens
                are equal
    outside     the number of tokens that vLLM's filters drop. Rounding can move tokens across a cutoff
    gap         the largest logit minus the logit of the token, if the parameters leave one choice (maximum)
    z           the mean log-probability of tokens minus its expectation under vLLM's probabilities, in standard errors
    logprobs    the largest error of the returned log-probabilities

The unit of gaps and errors is a rounding step: the epsilon of the model's type, times the largest absolute logit of the
row. vLLM discards the tokens of incomplete prompts, so the table does not count their rows.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

Z_LIMIT = 4.5
GAP_LIMIT, LOGPROB_LIMIT = 2, 1  # in rounding steps
OUTSIDE_LIMIT = 0.02  # share of the tokens of a kind of request with a filter
SHIFTED_SEEDS = 1 << 20

ONE_CHOICE = {"greedy", "greedy, penalties", "greedy, logprobs", "top-k 1"}
FILTERED = {"top-k 50, top-p 0.9", "top-p", "min-p", "top-k 20, penalty, logprobs", "top-k 2000"}
OF_VLLM = {"top-k 2000", "grammar"}  # The plugin leaves these rows to vLLM's sampler.


def kinds(tokens: int) -> dict[str, dict]:
    """Returns the parameters of each kind of request, by its name."""
    likely = {"logit_bias": {5: 12.0, 6: 12.0}, "stop_token_ids": [5, 6]}
    return {
        "plain": {},
        "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "top-p": {"temperature": 0.9, "top_p": 0.8},
        "min-p": {"temperature": 1.2, "min_p": 0.05},
        "top-k 1": {"top_k": 1},
        "top-k 2000": {"top_k": 2000, "max_tokens": tokens // 2},
        "penalties": {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.4},
        "repetition penalty": {"temperature": 0.6, "repetition_penalty": 1.3},
        "bias": {"temperature": 0.8, "logit_bias": {17: 9.0, 400: 7.5, 99: -50.0}},
        "allowed tokens": {"allowed_token_ids": list(range(1000, 1400))},
        "min tokens": {"temperature": 0.7, "min_tokens": tokens // 2, **likely},
        "logprobs": {"logprobs": 5},
        "top-k 20, penalty, logprobs": {"temperature": 0.7, "top_k": 20, "presence_penalty": 1.0, "logprobs": 3},
        "greedy": {"temperature": 0},
        "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        "greedy, logprobs": {"temperature": 0, "logprobs": 5},
    }


def moments(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of each row's token, and the mean and variance of this figure over all draws."""
    logprobs = scores.log_softmax(-1)
    probs, finite = logprobs.exp(), logprobs.clamp(min=-1e30)
    mean = (probs * finite).sum(-1)
    variance = (probs * (finite - mean[:, None]) ** 2).nan_to_num(0, 0, 0).sum(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], mean, variance


def z_score(rows: list[dict], name: str) -> float:
    """Returns the sum of the log-probabilities `name` minus its expectation, in standard deviations."""
    rows = [row for row in rows if row[name][0] > float("-inf")]
    variance = sum(row[name][2] for row in rows)
    return sum(row[name][0] - row[name][1] for row in rows) / sqrt(variance) if variance > 1e-6 else 0.0


def logprob_errors(output, raw: Tensor, counts: Tensor, step: Tensor) -> Tensor:
    """Returns the largest error of the log-probabilities of each row, in rounding steps; infinity if a rank is wrong.

    raw: the log-probabilities of vLLM's logits. counts: the number of results of each row, or -1 without results.
    """
    result, step = output.logprobs_tensors, step[:, None]
    values, ids = result.logprobs, result.logprob_token_ids.long().clamp(0, raw.shape[1] - 1)
    place = torch.arange(values.shape[1], device=raw.device)
    errors = (values - raw.gather(1, ids)).abs()
    # The first result is the drawn token. The others have the largest log-probabilities.
    largest = raw.topk(values.shape[1]).values.roll(1, 1)
    errors = torch.where(place > 0, errors.maximum((values - largest).abs()), errors)
    errors = torch.where(place <= counts[:, None], errors / step, 0).amax(1)
    drawn, rank = raw.gather(1, ids[:, :1]), result.selected_token_ranks.view(-1)
    is_rank = (rank > (raw > drawn + 2 * step).sum(1)) & (rank <= (raw > drawn - 2 * step).sum(1))
    return torch.where(is_rank | (counts < 0), errors, float("inf"))


def only(batch, grammar, row: int):
    """Returns a batch that has only one row of the given batch, and the row's part of the output of grammars."""
    columns = "idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos seq_lens seq_lens_cpu_upper_bound"
    names = ["req_ids", "logits_indices", *columns.split()]
    first = {name: getattr(batch, name)[:2] for name in ("cu_num_logits", "cu_num_logits_np")}
    alone = replace(batch, num_reqs=1, **first, **{name: getattr(batch, name)[row : row + 1] for name in names})
    ids = [] if grammar is None else grammar.structured_output_request_ids
    if batch.req_ids[row] not in ids:
        return alone, None
    at = ids.index(batch.req_ids[row])
    return alone, type(grammar)([ids[at]], grammar.grammar_bitmask[at : at + 1])


class Comparison:
    """Draws each step with the plugin and with vLLM's sampler, and collects figures of all rows.

    name_of: returns the kind of a request from its seed. rows: the figures of the rows of each kind.
    """

    def __init__(self, plugin, own, name_of: Callable[[int], str]):
        from flash_sampling import _vllm_requests
        from flash_sampling._vllm_draws import Draws

        self.last = _vllm_requests._LAST
        self.plugin, self.own, self.name_of, self.rows, self.drawn = plugin, own, name_of, defaultdict(list), []
        self.incomplete = self.miscounted = self.beside_grammars = 0
        draw = Draws.draw

        def recorded(this, hidden, batch, rows):
            self.drawn = list(range(batch.num_reqs)) if rows.at is None else rows.at.tolist()
            return draw(this, hidden, batch, rows)

        Draws.draw = recorded

    def step(self, runner, hidden, batch, grammar):
        self.drawn = []
        result = self.plugin(runner, hidden, batch, grammar)
        last, drawn, tokens = self.last.get(runner.sampler), self.drawn, result[0].sampled_token_ids[:, 0].clone()
        sampler, slots, at = runner.sampler, batch.idx_mapping_np, batch.logits_indices
        states, logits = sampler.sampling_states, runner.model.compute_logits(hidden[at])
        masked = [] if grammar is None else grammar.structured_output_request_ids
        if grammar is not None:
            self.beside_grammars += 0 < len(drawn) < len(slots)
            runner.structured_outputs_worker.apply_grammar_bitmask(logits, batch, masked, grammar.grammar_bitmask)
        given = batch.expanded_idx_mapping, batch.idx_mapping, slots, batch.positions[at], batch.input_ids[at]
        given += batch.expanded_local_pos, batch.seq_lens_cpu_upper_bound.numpy()
        unfiltered = sampler.apply_sampling_params(logits, *given, skip_top_k_top_p=True).float()
        own, kept = sampler.sample(logits, *given)
        own, kept = own.view(-1), kept.float()
        step = torch.finfo(logits.dtype).eps * logits.float().abs().amax(-1)
        alone = [self.plugin(runner, hidden, *only(batch, grammar, row))[0] for row in range(len(slots))]
        own_alone = [self.own(runner, hidden, *only(batch, grammar, row))[0] for row in range(len(slots))]
        states.seeds.gpu, seeds = states.seeds.gpu + SHIFTED_SEEDS, states.seeds.gpu
        shifted = self.plugin(runner, hidden, batch, grammar)[0].sampled_token_ids[:, 0]
        states.seeds.gpu = seeds
        # The plugin keeps data of its last call for the next step. Keep the data of the batch, not of a single row.
        self.last.pop(runner.sampler, None)
        if last is not None:
            self.last[runner.sampler] = last
        first = lambda outputs: torch.cat([output.sampled_token_ids[:, 0] for output in outputs])
        columns = {
            "is_equal": tokens == own,
            "gap": (unfiltered.amax(-1) - unfiltered.gather(1, tokens[:, None])[:, 0]) / step,
            "is_same_alone": first(alone) == tokens,
            "is_own_same_alone": first(own_alone) == own,
            "is_same_shifted": shifted == tokens,
            "count": result[1],
            "own_count": torch.cat([output.num_sampled for output in own_alone]),
        }
        for name, scores, drawn_tokens in (("z", kept, tokens), ("own_z", kept, own), ("hot_z", kept / 1.5, tokens)):
            columns[name] = torch.stack(moments(scores, drawn_tokens), 1)
        if result[0].logprobs_tensors is not None:
            counts = torch.as_tensor(states.num_logprobs[slots], device=logits.device)
            columns["logprobs"] = logprob_errors(result[0], logits.float().log_softmax(-1), counts, step)
        columns = {name: column.tolist() for name, column in columns.items()}
        for row, seed in enumerate(states.seeds.np[slots]):
            figures = {name: column[row] for name, column in columns.items()}
            name, has_grammar = self.name_of(int(seed)), batch.req_ids[row] in masked
            self.miscounted += figures["count"] != figures["own_count"]
            self.incomplete += figures["count"] == 0
            # After the end of a grammar, vLLM draws one more row without the grammar, and discards the token.
            if figures["count"] > 0 and has_grammar == (name == "grammar"):
                self.rows[name].append(figures | {"is_drawn": row in drawn})
        return result


class Verdicts:
    """Writes the verdict of each check, and records whether all checks passed."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.are_passed = say, True

    def add(self, is_passed, text: str):
        self.are_passed &= bool(is_passed)
        self.say(f"{'pass' if is_passed else 'FAIL'}: {text}")


def judge(comparison: Comparison, of_kinds: dict[str, dict], verdicts: Verdicts):
    """Writes the table of the rows of a comparison, and the verdicts."""
    groups, z, say, verdict = comparison.rows, {}, verdicts.say, verdicts.add
    say("\n| request | rows | rows of the plugin | equal | outside | gap | z, plugin | z, vLLM | logprobs |")
    say("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    count = lambda rows, test: sum(map(test, rows))
    is_outside = lambda row: row["z"][0] == float("-inf")
    for name, rows in groups.items():
        z[name] = [0.0, 0.0] if name in ONE_CHOICE else [z_score(rows, "z"), z_score(rows, "own_z")]
        cells = [name, len(rows), *(count(rows, lambda row: row[key]) for key in ("is_drawn", "is_equal"))]
        cells += [count(rows, is_outside), f"{max(row['gap'] for row in rows):.2f}" if name in ONE_CHOICE else ""]
        cells += [f"{score:+.2f}" for score in z[name]] if name not in ONE_CHOICE else ["", ""]
        cells.append(f"{max(row['logprobs'] for row in rows):.2f}" if "logprobs" in of_kinds[name] else "")
        say("| " + " | ".join(map(str, cells)) + " |")
    say("")
    some = lambda test: [row for name in groups if test(name) for row in groups[name]]
    rows, choices = some(lambda name: True), some(lambda name: name not in ONE_CHOICE)
    drawn = [row for row in rows if row["is_drawn"]]
    expected = len(some(lambda name: name not in OF_VLLM))
    wrong = count(some(lambda name: name in OF_VLLM), lambda row: row["is_drawn"]) + expected - len(drawn)
    text = f"the plugin drew {len(drawn)} rows (expected {expected}), vLLM's sampler drew {len(rows) - len(drawn)}"
    verdict(drawn and not wrong, text)
    limit = lambda name: OUTSIDE_LIMIT * len(groups[name]) + 1 if name in FILTERED else 0
    far = [name for name in groups if name not in ONE_CHOICE and count(groups[name], is_outside) > limit(name)]
    verdict(not far, f"requests with tokens that vLLM's filters drop, beyond rounding at cutoffs: {far or 'none'}")
    gaps = [row["gap"] for row in some(lambda name: name in ONE_CHOICE)]
    text = f"the largest gap of {len(gaps)} rows with one choice is {max(gaps):.2f}, limit {GAP_LIMIT}"
    verdict(max(gaps) <= GAP_LIMIT, text)
    largest = [max(abs(scores[which]) for scores in z.values()) for which in range(2)]
    verdict(max(largest) < Z_LIMIT, f"|z| is {largest[0]:.2f} (plugin) and {largest[1]:.2f} (vLLM), limit {Z_LIMIT}")
    hot = z_score(choices, "hot_z")
    verdict(abs(hot) > Z_LIMIT, f"control: z is {hot:+.2f} if vLLM's temperatures are multiplied by 1.5")
    errors = [row["logprobs"] for row in some(lambda name: "logprobs" in of_kinds[name])]
    text = f"the largest error of log-probabilities of {len(errors)} rows is {max(errors):.2f}, limit {LOGPROB_LIMIT}"
    verdict(max(errors) <= LOGPROB_LIMIT, text)
    different = {key: count(drawn, lambda row: not row[key]) for key in drawn[0] if "same" in key} if drawn else {}
    text = f"{different.get('is_same_alone')} of {len(drawn)} rows of the plugin have a different token alone"
    verdict(drawn and not different["is_same_alone"], f"{text} (vLLM's sampler: {different.get('is_own_same_alone')})")
    text = f"control: with shifted seeds, {different.get('is_same_shifted')} rows have a different token"
    verdict(drawn and different["is_same_shifted"], text)
