"""Converts the logits processors of transformers into parameters of the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._lib import FlashSamplingError, SamplingParams

# For each processor: the sampler's parameter, and the processor's attribute with its value. In the sampler's order.
_PARAMETERS = {
    "SequenceBiasLogitsProcessor": ("logit_bias", "sequence_bias"),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "TypicalLogitsWarper": ("typical_p", "mass"),
    "EpsilonLogitsWarper": ("epsilon_cutoff", "epsilon"),
}
_RANKS = {name: rank for rank, name in enumerate(_PARAMETERS)}

# For each processor: the banned tokens, and whether it bans them after `length` tokens, padding included.
_BANS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], bool]]] = {
    "NoBadWordsLogitsProcessor": (lambda p: _single_tokens(p), lambda p, length: True),
    "SuppressTokensLogitsProcessor": (lambda p: p.suppress_tokens, lambda p, length: True),
    "SuppressTokensAtBeginLogitsProcessor": (lambda p: p.begin_suppress_tokens, lambda p, length: length == p.begin_index),
    "MinLengthLogitsProcessor": (lambda p: p.eos_token_id, lambda p, length: length < p.min_length),
    "MinNewTokensLengthLogitsProcessor": (
        lambda p: p.eos_token_id,
        lambda p, length: length - p.prompt_length_to_skip < p.min_new_tokens,
    ),
}

# For each processor: the forced token, and whether it forces it after `length` tokens, padding included.
_FORCED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], bool]]] = {
    "ForcedBOSTokenLogitsProcessor": (lambda p: [p.bos_token_id], lambda p, length: length == 1),
    "ForcedEOSTokenLogitsProcessor": (lambda p: p.eos_token_id, lambda p, length: length == p.max_length - 1),
}


class Processors:
    """The sampler's parameters at each step, for a list of logits processors.

    vocab_size: the number of tokens of the vocabulary; banned tokens beyond it have no effect.

    Raises FlashSamplingError that names the class of a processor without a parameter, or out of the sampler's order.
    """

    def __init__(self, processors, do_sample: bool, vocab_size: int):
        self._parameters: dict[str, Any] = {"order": "hugging-face"}
        self._bans: list[tuple[Any, list[int]]] = []
        self._forced: list[tuple[Any, list[int]]] = []
        self._made: dict[tuple[bool, ...], SamplingParams] = {}
        self.repetition: Any = None
        last = -1
        for processor in processors:
            name = type(processor).__name__
            if type(processor).__module__ != "transformers.generation.logits_process":
                raise refused(processor, "is not a processor of transformers")
            if name in _BANS or name in _FORCED:
                if last > _RANKS["TemperatureLogitsWarper"]:
                    raise refused(processor, "is after a filter")
                self._add_tokens(processor, vocab_size)
            elif name == "LogitNormalization":
                # It shifts all logits by a constant, which changes only a later repetition penalty.
                last = max(last, _RANKS["RepetitionPenaltyLogitsProcessor"])
            elif name in _PARAMETERS:
                if _RANKS[name] <= last:
                    raise refused(processor, "is not in the sampler's order, or is twice in the list")
                last = _RANKS[name]
                self._add_parameter(processor)
            else:
                raise refused(processor, "has no parameter of the sampler")
        if not do_sample:
            self._parameters["temperature"] = 0.0

    def _add_parameter(self, processor):
        infinity = float("inf")
        if getattr(processor, "min_tokens_to_keep", 1) != 1 or getattr(processor, "filter_value", -infinity) != -infinity:
            raise refused(processor, "has min_tokens_to_keep or filter_value, which must have their defaults")
        name, attribute = _PARAMETERS[type(processor).__name__]
        self._parameters[name] = getattr(processor, attribute)
        if name == "logit_bias":
            self._parameters[name] = dict(zip(_single_tokens(processor), processor.sequence_bias.values()))
        elif name == "repetition_penalty":
            self.repetition = processor

    def _add_tokens(self, processor, vocab_size):
        name = type(processor).__name__
        table, rows = (_BANS, self._bans) if name in _BANS else (_FORCED, self._forced)
        tokens, is_active = table[name]
        tokens = tokens(processor)
        tokens = [token for token in getattr(tokens, "tolist", lambda: tokens)() if 0 <= token < vocab_size]
        if name in _FORCED and len(tokens) != 1:
            raise refused(processor, f"forces {len(tokens)} tokens of the vocabulary, but must force one")
        rows.append((lambda length: is_active(processor, length), tokens))

    def params(self, length: int) -> SamplingParams:
        """The parameters for the token after `length` tokens, padding included."""
        key = tuple(is_active(length) for is_active, _ in self._forced + self._bans)
        if key not in self._made:
            self._made[key] = self._make(length)
        return self._made[key]

    def _make(self, length):
        for is_active, tokens in self._forced:
            if is_active(length):
                return SamplingParams(temperature=0.0, allowed_token_ids=tokens)
        banned = sorted({token for is_active, tokens in self._bans if is_active(length) for token in tokens})
        return SamplingParams(**self._parameters, banned_token_ids=banned or None)

    def first_penalized(self, rows: int) -> list[int]:
        """For each row, the index of the first token that the repetition penalty counts, padding included."""
        first = self.repetition.prompt_ignore_length
        first = first.tolist() if hasattr(first, "tolist") else first or 0
        return [first] * rows if isinstance(first, int) else first


def refused(processor, why: str) -> FlashSamplingError:
    """The error for an unsupported processor."""
    error = FlashSamplingError(f"{type(processor).__name__} {why}")
    error.knob = "logits_processor"
    return error


def _single_tokens(processor) -> list[int]:
    if any(len(tokens) != 1 for tokens in processor.sequence_bias):
        raise refused(processor, "has a sequence of several tokens, but must have single tokens")
    return [int(tokens[0]) for tokens in processor.sequence_bias]
